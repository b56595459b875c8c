"""Tiny models, DeepSpeed configs and an oracle, for tests of anything that touches ZeRO-3.

Sizes are odd on purpose (a vocabulary of 131, an MLP of 67): partitions are uneven at 2 and at 3
ranks, and with the configs of `ds_config` both persistent and partitioned parameters exist, which
the defaults never show on a model this small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 131
POSITIONS = 32


class Odd(nn.Module):
    """A tied language model with every odd tensor that a checkpoint has to survive.

    Buffers of int64, bool, fp64, complex and no dimension, one of them not persistent; a parameter
    with two names in one module; a module registered twice; equal tensors that are not shared;
    parameters of one and of no element (not used: DeepSpeed's own fetch fails on those).
    """

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, 24)
        self.ln = nn.LayerNorm(24)
        self.fc = nn.Linear(24, 24)
        self.again = self.fc
        self.twin = nn.Linear(24, 24)
        self.twin.load_state_dict(self.fc.state_dict())
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight
        self.one = nn.Parameter(torch.full((1,), 1.25))
        self.uno = self.one
        self.unused = nn.ParameterList([torch.empty(0, 3)])
        self.register_buffer("count", torch.tensor([16_777_217], dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("third", torch.tensor([1 / 3], dtype=torch.float64))
        self.register_buffer("scalar", torch.tensor(1.000_123_4))
        self.register_buffer("phase", torch.tensor([0.5 + 2j], dtype=torch.complex64))
        self.register_buffer("scale", torch.full((24,), 0.5), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the next-token loss."""
        hidden = self.ln(self.emb(tokens) * self.scale.to(self.emb.weight.dtype))
        hidden = hidden + self.again(torch.relu(self.fc(hidden))) + self.twin(hidden) * self.one
        logits = self.head(hidden)
        return next_token_loss(logits, tokens)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of each token given those before it, computed in fp32."""
    flat = logits[:, :-1].float().reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1))


def build(name: str, seed: int = 0) -> nn.Module:
    """Return a tiny model: gpt2, llama, llama_tied, t5, bert, odd, frozen or checkpointed.

    gpt2 and llama_tied tie input and output embeddings, t5 holds one tensor under several names,
    bert brings buffers, frozen is a gpt2 whose first half does not train, checkpointed a gpt2 whose
    blocks sit in activation-checkpoint wrappers. Dropout is on where the architecture has it.
    """
    torch.manual_seed(seed)
    if name == "odd":
        return Odd()
    model = _hugging_face(name)
    if name == "frozen":
        for key, parameter in model.named_parameters():
            parameter.requires_grad = not key.startswith(("transformer.wte", "transformer.h.0"))
    if name == "checkpointed":
        _wrap_blocks(model)
    return model


def _hugging_face(name: str) -> nn.Module:
    import transformers as hf

    size: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    if name in {"gpt2", "frozen", "checkpointed"}:
        gpt2 = hf.GPT2Config(
            **size, n_layer=2, n_embd=32, n_head=2, n_inner=67, n_positions=POSITIONS
        )
        return _module(hf.GPT2LMHeadModel(gpt2))
    if name in {"llama", "llama_tied"}:
        llama = hf.LlamaConfig(
            **size,
            hidden_size=32,
            intermediate_size=67,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=name == "llama_tied",
        )
        return _module(hf.LlamaForCausalLM(llama))
    if name == "t5":
        t5 = hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=24,
            d_kv=12,
            d_ff=67,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
        return _module(hf.T5ForConditionalGeneration(t5))
    if name == "bert":
        bert = hf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=67,
            max_position_embeddings=POSITIONS,
        )
        return _module(hf.BertForMaskedLM(bert))
    raise ValueError(f"no tiny model is called {name!r}")


def _module(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model


def _wrap_blocks(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    blocks = model.transformer.h
    for index, block in enumerate(blocks):
        blocks[index] = checkpoint_wrapper(block)


def batch(seed: int, rows: int = 2, width: int = 16) -> Tensor:
    """Return tokens of shape `[rows, width]` that depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, width), generator=generator)


def loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss of a tiny model, or of an engine around one, on a batch of tokens."""
    inner = getattr(model, "module", model)
    odd = isinstance(inner, Odd)
    found = model(tokens) if odd else model(input_ids=tokens, labels=tokens).loss
    assert isinstance(found, Tensor)
    return found


def evaluate(module: nn.Module) -> float:
    """Return the loss on one fixed batch, the same on every rank. Use as `eval_fn`."""
    return loss(module, batch(seed=7, rows=8)).item()


def ds_config(
    *,
    stage: int = 3,
    dtype: str = "bf16",
    lr: float = 1e-2,
    accumulation_steps: int = 1,
    forced_release: bool = True,
    zero: dict[str, Any] | None = None,
    optimizer: bool = True,
) -> dict[str, Any]:
    """Return a DeepSpeed config for a CPU.

    Args:
        stage: ZeRO stage.
        dtype: fp32, bf16 or fp16.
        lr: learning rate of AdamW.
        accumulation_steps: micro batches a step.
        forced_release: a persistence threshold of 1000 elements and no reuse distance, so that
            parameters are really released; DeepSpeed's defaults keep every parameter of a tiny
            model gathered for ever.
        zero: more settings for `zero_optimization`.
        optimizer: whether DeepSpeed makes the optimizer.
    """
    settings: dict[str, Any] = {"stage": stage}
    if forced_release and stage == 3:
        settings |= {
            "stage3_param_persistence_threshold": 1000,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
        }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": 0.0,
        "zero_optimization": settings | (zero or {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "loss_scale": 128.0},
    }
    if optimizer:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}}
    return config


def make_engine(model: nn.Module, config: dict[str, Any], optimizer: Any = None) -> Any:
    """Return a DeepSpeed engine over a model; collective."""
    import deepspeed

    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trainable, config=config, optimizer=optimizer
    )
    return engine


def train(engine: Any, steps: range, between: Callable[[int], None] | None = None) -> list[float]:
    """Train on a batch a step and rank, and return this rank's losses; collective.

    Args:
        engine: a DeepSpeed engine with an optimizer.
        steps: numbers of the micro batches, which choose the data.
        between: called with the step's number between its backward pass and its update.
    """
    losses = []
    for step in steps:
        value = loss(engine, batch(seed=1000 * step + engine.global_rank))
        engine.backward(value)
        if between is not None:
            between(step)
        engine.step()
        losses.append(value.item())
    return losses


def truth(module: nn.Module) -> dict[str, Tensor]:
    """Return every value of `state_dict()` rebuilt from the partitions alone; collective.

    The oracle for what was trained: all ranks' `ds_tensor`, put one behind the other, cut to the
    parameter's size. It touches no gathered copy and no ZeRO state.
    """
    import torch.distributed as dist

    values: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if hasattr(tensor, "ds_tensor"):
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, tensor.ds_tensor.detach().clone())
            values[name] = torch.cat(parts)[: tensor.ds_numel].view(tensor.ds_shape)
        elif isinstance(tensor, Tensor):
            values[name] = tensor.detach().clone()
    return values
