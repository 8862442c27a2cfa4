"""Stages of several devices: each holds a shard of the same layers, and computes micro-batches of its own.

Sharded data parallelism (Rajbhandari et al. 2020, ZeRO, section 5.3; Zhao et al. 2023, FSDP) among the
devices of one node that share a pipeline's stage (Jang et al. 2023, Oobleck, section 4.1), with gradients
that become integers where they are added up: so no bit shows how many devices a stage has. Owns when a
device may read the memory of the others, the weights while a layer needs them, and what is sent of
gradients. What a shard is ``state.shards`` says, who is in a group ``planner.plan.Layout``.
"""
