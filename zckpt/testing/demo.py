"""Train a small model under ZeRO-3, save it, load it three ways, compare the losses bit by bit.

What `zckpt demo` runs; needs deepspeed and transformers and no network. Every loss is computed in
rank processes of one thread each, by one function on one batch, so that equal weights give equal
bits. The calling process imports no framework.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zckpt
from zckpt.errors import MissingExtraError
from zckpt.testing.ranks import run_ranks
from zckpt.writers.commit import check_target

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from torch import Tensor

DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": 1_000_000,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3,
        # Far below the default, so that a model this small is not kept gathered as a whole.
        "stage3_param_persistence_threshold": 1000,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
    },
    "bf16": {"enabled": True},
}
"""What DeepSpeed is given, on any number of ranks."""

_FILE_END = 256
"""The token behind each source file; the others are its bytes."""

_WINDOW = 128
"""Tokens in a sequence."""

_HELD_OUT_WINDOWS = 16
"""Sequences at the end of the text that are evaluated on and never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The loss of one model that holds, or should hold, the trained weights."""

    what: str
    losses: tuple[float, ...]
    """One per rank."""
    is_equal: bool
    """Whether every rank's is the recorded loss, bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """What the demo measured."""

    path: Path
    before: float
    """The loss before training."""
    recorded: float
    """The loss in the manifest."""
    evaluations: tuple[Evaluation, ...]
    seconds: dict[str, float]
    """Wall seconds by stage."""

    @property
    def is_fine(self) -> bool:
        """Whether every evaluation gave the recorded loss."""
        return all(evaluation.is_equal for evaluation in self.evaluations)


def run(
    out_dir: str | os.PathLike[str],
    *,
    ranks: int = 2,
    reload_ranks: int = 3,
    steps: int = 30,
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> DemoReport:
    """Train, save to `out_dir`, load it three ways, and return the losses.

    What ranks print is dropped; when one fails, the error holds it.

    Args:
        out_dir: the folder to make.
        ranks: how many ranks train and save.
        reload_ranks: how many ranks the checkpoint is loaded on again.
        steps: optimizer steps.
        overwrite: replace a checkpoint at `out_dir`.
        tell: called with the name of each stage when it begins.

    Raises:
        MissingExtraError: deepspeed or transformers is not installed.
        TargetExistsError, UsageError: `out_dir` must not be replaced.
        RanksError: a rank failed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("deepspeed", "transformers")):
        raise MissingExtraError(
            "the demo needs deepspeed and transformers: pip install 'zckpt[train,transformers]'"
        )
    path = Path(out_dir).expanduser().resolve()
    check_target(path, overwrite=overwrite)
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(name: str) -> Iterator[None]:
        tell(name)
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            yield
        seconds[name] = time.perf_counter() - start

    tokens = source_tokens()
    timeout_s = 120.0 + steps
    with stage(f"training on {_count(ranks)} and saving"):
        trained = run_ranks(
            train_and_save,
            ranks,
            str(path),
            tokens,
            steps=steps,
            overwrite=overwrite,
            timeout_s=timeout_s,
        )
    with stage("loading into plain models"):
        ((plain, hugging_face),) = run_ranks(evaluate_plainly, 1, str(path), tokens)
    with stage(f"loading on {_count(reload_ranks)}"):
        reloaded = run_ranks(
            evaluate_under_zero, reload_ranks, str(path), tokens, timeout_s=timeout_s
        )
    before, _, recorded = trained[0]

    def compared(what: str, *losses: float) -> Evaluation:
        is_equal = {loss.hex() for loss in losses} == {recorded.hex()}
        return Evaluation(what=what, losses=losses, is_equal=is_equal)

    return DemoReport(
        path=path,
        before=before,
        recorded=recorded,
        evaluations=(
            compared(f"live, ZeRO-3 on {_count(ranks)}", *(live for _, live, _ in trained)),
            compared("loaded, plain model", plain),
            compared("loaded, from_pretrained", hugging_face),
            compared(f"loaded, ZeRO-3 on {_count(reload_ranks)}", *reloaded),
        ),
        seconds=seconds,
    )


def _count(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


# ------------------------------------------------------------------ what ranks run


def train_and_save(
    path: str, tokens: list[int], *, steps: int, overwrite: bool
) -> tuple[float, float, float]:
    """Return the loss before training, after it, and as the manifest has it.

    **Collective:** the ranks train together.
    """
    import torch
    import torch.distributed as dist

    engine = _engine(seed=0)
    eval_fn = functools.partial(evaluate, tokens=tokens)
    before = eval_fn(engine.module)
    text = torch.tensor(tokens[: -_HELD_OUT_WINDOWS * _WINDOW])
    random = torch.Generator().manual_seed(dist.get_rank())
    rows = DS_CONFIG["train_micro_batch_size_per_gpu"]
    for _ in range(steps):
        starts = torch.randint(len(text) - _WINDOW, (rows, 1), generator=random)
        engine.backward(_loss(engine, text[starts + torch.arange(_WINDOW)]))
        engine.step()
    live = eval_fn(engine.module)
    report = zckpt.save_consolidated(engine, path, eval_fn=eval_fn, overwrite=overwrite)
    record = report.manifest.evaluation
    if record is None:
        raise AssertionError("save_consolidated was given eval_fn and recorded no evaluation")
    return before, live, float.fromhex(record.mean.hex)


def evaluate_plainly(path: str, tokens: list[int]) -> tuple[float, float]:
    """Return the loss of a plain model that zckpt filled, and of one that transformers loaded."""
    import torch
    from transformers import GPT2LMHeadModel

    hugging_face = GPT2LMHeadModel.from_pretrained(path).to(torch.bfloat16)
    return evaluate(_loaded(path), tokens), evaluate(hugging_face, tokens)


def evaluate_under_zero(path: str, tokens: list[int]) -> float:
    """Return the loss of the checkpoint in a new ZeRO-3 engine.

    **Collective:** the ranks are those of the engine.
    """
    engine = _engine(seed=2)
    zckpt.load_consolidated(engine, path)
    return evaluate(engine.module, tokens)


def evaluate_checkpoint(path: str) -> float:
    """Return the loss of a checkpoint that this version of zckpt's demo made.

    For `zckpt verify zckpt-demo --eval zckpt.testing.demo:evaluate_checkpoint`. Of another version
    the source text is another one.
    """
    return evaluate(_loaded(path), source_tokens())


def evaluate(module: Any, tokens: list[int]) -> float:
    """Return the loss on the held-out end of the text, computed by one thread."""
    import torch

    batch = torch.tensor(tokens[-_HELD_OUT_WINDOWS * _WINDOW :]).view(_HELD_OUT_WINDOWS, _WINDOW)
    was_training, threads = module.training, torch.get_num_threads()
    module.eval()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return _loss(module, batch).item()
    finally:
        torch.set_num_threads(threads)
        module.train(was_training)


def source_tokens() -> list[int]:
    """Return the text of zckpt's own source files as tokens, one file behind the other."""
    tokens: list[int] = []
    for file in sorted(Path(zckpt.__file__).parent.rglob("*.py")):
        tokens += [*file.read_bytes(), _FILE_END]
    return tokens


def _loss(module: Any, batch: Tensor) -> Tensor:
    """Return the mean cross entropy of the next tokens, in fp32."""
    import torch

    logits = module(input_ids=batch).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _loaded(path: str) -> Any:
    """Return a plain model in the engine's dtype with the checkpoint's values."""
    import torch

    model = _model(seed=1).to(torch.bfloat16)
    zckpt.load_consolidated(model, path)
    return model


def _model(seed: int) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=_FILE_END + 1,
            n_positions=_WINDOW,
            n_layer=2,
            n_embd=64,
            n_head=4,
            n_inner=255,  # odd: with the vocabulary, uneven partitions on two and on three ranks
            bos_token_id=_FILE_END,
            eos_token_id=_FILE_END,
            tie_word_embeddings=True,
        )
    )


def _engine(seed: int) -> Any:
    import deepspeed

    model = _model(seed)
    return deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=DS_CONFIG
    )[0]
