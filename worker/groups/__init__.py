"""Process groups: payloads of large tensor messages between devices by NCCL, one group an epoch.

Owns which messages take it and what becomes of them when it breaks. Does not own the messages' truth: the
transport carries every header and every group message, and any payload that a group has lost.
docs/groups.md has the whole protocol.
"""
