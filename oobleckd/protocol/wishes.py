"""Keys that a job.toml does not have and that others' configurations do: what is there instead, and the page
that speaks of it.

Owns the list. A key is looked up by its name alone, in whichever table it stands.
"""

from __future__ import annotations

from typing import NamedTuple


class Wish(NamedTuple):
    """What to say of a key: why it is not there, and where to read on."""

    problem: str
    page: str


_DATA = "docs/data.md"
_LOOP = "docs/limits.md#training"
_PARALLEL = "docs/limits.md#parallelism-and-plans"

_TOKENIZER = Wish("data.tokenizer is a folder with a tokenizer.json, or such a file", _DATA)
_SOURCES = Wish("data is local files (data.source, data.path): no data sets by name, no streams", _DATA)
_MIXED = Wish("several sources are tables [[data.source]], each with its weight", f"{_DATA}#mix-sources")
_EVAL = Wish(
    "what is evaluated while training stands in the table [eval]", "docs/data.md#evaluate-while-training"
)
_LOGGER = Wish('a logger is a table [[sink]] with its kind, such as "wandb"', "docs/sinks.md")
_HOOK = Wish(
    "what runs a command or calls a URL stands in the daemon's configuration, under [[daemon.on_event]]: "
    "whoever may submit a job may run nothing on its machine",
    "docs/sinks.md#when-something-happens",
)
_COMPILE = Wish("train.compile says whether layers are compiled", "docs/compile.md")
_RECOMPUTE = Wish("schedule.recompute says what is computed again in the backward", "docs/recompute.md")
_OFFLOAD = Wish("nothing is moved to the host's memory to make room", _PARALLEL)
_ADAPTER = Wish("there are no adapters: the model's own parameters are trained", _LOOP)
_QUANTIZED = Wish("weights are float32 and are not quantized", _LOOP)
_OPTIMIZER = Wish("optimizer.name says which rule updates parameters", "docs/optimizers.md")
_FROZEN = Wish("[[optimizer.group]] says what is frozen, or updated otherwise", "docs/optimizers.md#groups")
_RATE = Wish("optimizer.schedule says what the learning rate does behind its warm-up", "docs/recipe.md")
_RAMP = Wish(
    "train.batch_ramp has fewer sequences in a step at first: a table of start, increment and samples",
    "docs/recipe.md#batch-ramp",
)
_SPLIT = Wish("the planner splits the model by layers, and nothing else splits it", _PARALLEL)
_PIPELINES = Wish("the planner chooses the pipelines", _PARALLEL)
_MOE = Wish(
    "a mixture of experts is a family (model.family), and how many experts it has says model.config",
    "docs/models.md",
)
_PLACED = Wish("all experts of a block are on the device that has the block", _PARALLEL)
_CHATS = Wish(
    "chats are data.format, and [data.chat] says what the loss asks for", f"{_DATA}#chats-and-completions"
)
_TUNING = Wish("the loss names tokens: there are no rewards, and no loss of one's own", _LOOP)
_NODES = Wish("devices belong to nodes, and a job takes what has joined", "docs/job-toml.md#resources")
_CHANGED = Wish("this key has another name here", "docs/job-toml.md")

_GROUPS: tuple[tuple[Wish, str], ...] = (
    (_TOKENIZER, """
        tokenizer_name vocab_file merges_file add_special_tokens
    """),
    (_SOURCES, """
        dataset dataset_name dataset_path hf_dataset streaming jsonl parquet num_workers
        shuffle data_collator
    """),
    (_MIXED, """
        datasets mixture mix data_mix data_mixture mixture_weights weights probabilities blend data_blend
        sources curriculum annealing
    """),
    (_EVAL, """
        evaluation validation eval_every eval_steps eval_interval eval_iters eval_strategy
        evaluation_strategy val_data val_check_interval early_stopping metrics
    """),
    (_LOGGER, """
        wandb tensorboard mlflow logger loggers logging log_every log_interval logging_steps report_to
        tracker aim comet run_name sinks csv
    """),
    (_HOOK, "on_event on_events hooks hook webhook webhooks notify notifications alerts slack"),
    (_COMPILE, "compile torch_compile"),
    (_RECOMPUTE, """
        gradient_checkpointing activation_checkpointing activation_checkpoint recompute
        recompute_activations recompute_granularity recompute_method selective_checkpointing
    """),
    (_OFFLOAD, "cpu_offload offload offload_activations"),
    (_ADAPTER, "lora qlora peft adapter adapters lora_r lora_alpha"),
    (_QUANTIZED, "quantization quantize load_in_8bit load_in_4bit fp8 fp16 amp scaler grad_scaler"),
    (_OPTIMIZER, """
        optim optimizer_type optimizer_name muon adafactor adam adamw lion sgd fused
    """),
    (_FROZEN, "param_groups no_decay freeze frozen frozen_parameters trainable"),
    (_RATE, "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style wsd"),
    (_RAMP, """
        rampup_batch_size batch_size_rampup batch_rampup batch_warmup batch_size_warmup
        batch_size_schedule batch_schedule global_batch_size_rampup
    """),
    (_SPLIT, """
        tensor_parallel tensor_parallel_size tp tp_size tensor_model_parallel_size sequence_parallel
        context_parallel cp fsdp zero zero_stage deepspeed ddp distributed parallelism
    """),
    (_PIPELINES, """
        pipeline_parallel pipeline_parallel_size pp pp_size pipeline_model_parallel_size data_parallel
        data_parallel_size dp num_stages
    """),
    (_MOE, "moe experts num_experts num_local_experts n_routed_experts num_experts_per_tok"),
    (_PLACED, "expert_parallel expert_parallel_size expert_model_parallel_size ep ep_size"),
    (_CHATS, """
        sft instruct messages conversations loss_mask labels train_on_inputs assistant_only_loss
        completion_only_loss prompt_template
    """),
    (_TUNING, "dpo rlhf reward_model loss loss_fn callbacks"),
    (_NODES, """
        num_nodes nnodes devices gpus num_gpus nproc_per_node num_devices accelerator device partition
    """),
)  # fmt: skip
_NAMES = {
    "learning_rate": "optimizer.lr", "beta1": "optimizer.betas", "beta2": "optimizer.betas",
    "grad_clip": "optimizer.clip_norm", "gradient_clip": "optimizer.clip_norm",
    "gradient_clip_val": "optimizer.clip_norm", "max_grad_norm": "optimizer.clip_norm",
    "lr_wsd_decay_style": "optimizer.decay_type", "lr_wsd_decay_iters": "optimizer.decay_steps",
    "warmup": "optimizer.warmup_steps", "warmup_ratio": "optimizer.warmup_steps",
    "min_lr": "optimizer.min_lr_ratio", "epochs": "train.steps", "num_epochs": "train.steps",
    "num_train_epochs": "train.steps", "max_steps": "train.steps", "train_iters": "train.steps",
    "max_iters": "train.steps", "batch_size": "train.global_batch", "global_batch_size": "train.global_batch",
    "per_device_train_batch_size": "train.micro_batch", "micro_batch_size": "train.micro_batch",
    "gradient_accumulation": "train.micro_batch", "gradient_accumulation_steps": "train.micro_batch",
    "grad_accum": "train.micro_batch", "seq_len": "train.sequence", "seq_length": "train.sequence",
    "sequence_length": "train.sequence", "max_length": "train.sequence", "max_seq_length": "train.sequence",
    "block_size": "train.sequence", "context_length": "train.sequence", "dtype": "train.precision",
    "bf16": "train.precision", "mixed_precision": "train.precision", "save_steps": "checkpoint.every",
    "save_every": "checkpoint.every", "save_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep", "output_dir": "checkpoint.dir", "save_dir": "checkpoint.dir",
    "resume": "submit --resume", "resume_from_checkpoint": "submit --resume", "model_type": "model.family",
    "architecture": "model.family", "pretrained": "model.checkpoint",
    "model_name_or_path": "model.checkpoint", "hidden_size": "model.config", "n_layer": "model.config",
    "n_embd": "model.config", "num_layers": "model.config", "vocab_size": "model.config",
    "tokenizer": "data.tokenizer", "tokenizer_path": "data.tokenizer",
    "tokenizer_name_or_path": "data.tokenizer", "text_column": "data.column", "text_field": "data.column",
    "bos": "data.bos", "add_bos_token": "data.bos", "eos": "data.eos", "add_eos_token": "data.eos",
    "eos_token": "data.eos", "append_eod": "data.eos", "data_cache": "data.cache",
    "chat_template": "data.chat.template", "packing": "data.sequences",
    "moe_aux_loss_coeff": "train.router_aux_loss_coef", "aux_loss_coef": "train.router_aux_loss_coef",
    "moe_z_loss_coeff": "train.router_z_loss_coef", "z_loss_coef": "train.router_z_loss_coef",
}  # fmt: skip
"""What others call it -> where it is set here."""

WISHES: dict[str, Wish] = {key: wish for wish, keys in _GROUPS for key in keys.split()}
WISHES |= {key: _CHANGED._replace(problem=f"this is {name} here") for key, name in _NAMES.items()}


def wish_of(key: str, table: str = "") -> Wish | None:
    """What is known of a key that does not exist, in ``table``; None where nothing is."""
    plain = key.lower().replace("-", "_")
    if table == "optimizer" and plain in {"name", "type", "rule", "kind"}:
        return _OPTIMIZER
    if table == "data" and plain in {"type", "name", "split"}:
        return _SOURCES
    return WISHES.get(plain)
