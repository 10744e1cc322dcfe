"""Measure on a tiny copy of a model whether packing mixes documents, and which layers do it.

Two documents go through the model in one row, with the mask of packed batches. Then the first is replaced:
if the second changes, something mixes them. Modules whose input for the second document is the same, but
whose output is not, carry state; :mod:`.stateful` calls these document by document, and the model is measured
once more.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from packhorse.errors import require
from packhorse.families.models import attention_of, set_attention, supports_sdpa, text_config
from packhorse.families.packing import layer_kinds
from packhorse.families.stateful import install, layers_of
from packhorse.families.tiny import tiny_settings
from packhorse.families.varlen import VARLEN, register_varlen
from packhorse.utils.files import build_once, digest

logger = logging.getLogger("packhorse.families.probe")

_LENGTHS = ((40, 24), (24, 40), (7, 57))  # of document 1 and document 2; the first finds the layers
_FIRST, _SECOND = _LENGTHS[0]
_MOST_WEIGHTS = 50_000_000
_VERSION = 3  # of the probe: cached results of another one are not used
_FACTOR = 4  # what is allowed, in units of the noise floor
_CONTROL = 20  # a leaking mask changes at least this many times what is allowed
_ROUNDS = 3  # state may be carried by a layer and by another that contains it
_STATE_WEIGHTS = frozenset({"A_log", "dt_bias", "time_decay"})
_UNITS = 8  # the least noise floor, in units of rounding


@dataclass(frozen=True, slots=True)
class Probe:
    """What a tiny copy of a model does with two documents in one row.

    Attributes:
        layers: classes of the layers that carry state; to be called document by document.
        problem: why packed rows are wrong nevertheless, or could not be measured; empty if they are right.
        wrong: whether they are wrong.
        leak: largest change of a logit of document 2 when document 1 is replaced, layers called as above.
        difference: largest difference of a logit of document 2 from document 2 alone.
        floor: largest difference between two correct computations of document 2 alone.
        control: as ``leak``, with a mask that lets document 2 see document 1.
        unhandled: as ``leak``, without calling layers document by document.
        varlen: why packed rows are wrong with attention that takes the boundaries of documents instead of a
            mask; empty if they are right.
    """

    layers: tuple[str, ...] = ()
    problem: str = ""
    wrong: bool = False
    leak: float = 0.0
    difference: float = 0.0
    floor: float = 0.0
    control: float = 0.0
    unhandled: float = 0.0
    varlen: str = ""


def probe(model_class: Any, config: Any) -> Probe:
    """Return what a tiny copy of a model does; measured once for each class, version and kind of config."""
    settings = tiny_settings(config.to_dict())
    key = digest(
        str(_VERSION),
        require("transformers", "train").__version__,
        torch.__version__,
        f"{model_class.__module__}.{model_class.__qualname__}",
        _source(model_class),
        json.dumps(settings, sort_keys=True, default=str),
    )
    if key not in _RESULTS:
        logger.info("measuring on a tiny copy whether %s can be packed", model_class.__name__)

        def write(file: Any) -> None:
            file.write(json.dumps(asdict(measure(model_class, config, settings))).encode())

        found = json.loads(build_once(f"probe-{key}.json", write).read_bytes())
        _RESULTS[key] = Probe(**{**found, "layers": tuple(found["layers"])})
    return _RESULTS[key]


_RESULTS: dict[str, Probe] = {}


def _source(model_class: type) -> str:
    """Return the source of a class that is not of transformers: such code has no version."""
    if model_class.__module__.startswith("transformers."):
        return ""
    try:
        return inspect.getsource(inspect.getmodule(model_class) or model_class)
    except (OSError, TypeError):  # defined in an interactive session
        return repr(model_class) + str(id(model_class))


def measure(model_class: Any, config: Any, settings: Mapping[str, Any] | None = None) -> Probe:
    """Build a tiny copy of a model with random weights, and measure it."""
    settings = tiny_settings(config.to_dict()) if settings is None else settings
    with _random_numbers():
        model, problem = _try(lambda: _build(model_class, config, settings))
        if problem:
            return Probe(problem=f"a tiny copy of it cannot be built ({problem})")
        return _measure(_Rows(model))


def _measure(rows: _Rows) -> Probe:
    before, problem = _try(rows.compare)
    if problem:
        # Models without attention reject the mask of packed rows, which their layers do not need.
        layers = _layers_with_state(rows.model)
        if not layers:
            return Probe(problem=f"a tiny copy of it cannot be run ({problem})")
        return _measure_separated(rows, layers, {}, f"a packed row cannot be run ({problem})")
    if before.control <= _CONTROL * before.allowed:
        why = f"a mask that leaks changes it by {before.control:.1e}, rounding by {before.floor:.1e}"
        return Probe(problem=f"a tiny copy of it shows nothing: {why}", floor=before.floor)
    numbers: dict[str, Any] = {"floor": before.floor, "control": before.control, "unhandled": before.leak}
    if before.ok:
        varlen = _varlen_problem(rows)
        return Probe(leak=before.leak, difference=before.difference, varlen=varlen, **numbers)
    numbers |= {"leak": before.leak, "difference": before.difference}
    what = f"document 2 of a pack changes by {before.leak:.1e} when document 1 is replaced"
    if before.leak <= before.allowed:
        what = f"document 2 of a pack differs from document 2 alone by {before.difference:.1e}"
    if layers := rows.leaking_layers(before.allowed):
        return _measure_separated(rows, layers, numbers, what)
    return Probe(problem=f"{what}, in no layer that carries state", wrong=True, **numbers)


def _measure_separated(rows: _Rows, layers: tuple[str, ...], numbers: dict[str, Any], what: str) -> Probe:
    """Measure with these layers, and those that contain them if need be, called document by document."""
    for _ in range(_ROUNDS):
        install(rows.model, layers)
        after, problem = _try(rows.compare)
        if problem:
            names = ", ".join(layers)
            why = f"{what}: {names} cannot be called document by document ({problem})"
            return Probe(problem=why, wrong=bool(numbers), **numbers)
        numbers = {"floor": after.floor, "control": after.control} | numbers
        numbers |= {"leak": after.leak, "difference": after.difference}
        more = () if after.ok else rows.leaking_layers(after.allowed)
        if not more:
            break
        layers = _outermost(rows.model, (*layers, *more))
    if after.ok:
        return Probe(layers, varlen=_varlen_problem(rows), **numbers)
    remains = max(after.leak, after.difference)
    why = f"{what}; with {', '.join(layers)} called document by document, by {remains:.1e}"
    return Probe(problem=why, wrong=True, **numbers)


def _varlen_problem(rows: _Rows) -> str:
    """Return why packed rows are wrong with attention that takes the boundaries of documents."""
    register_varlen()
    set_attention(rows.model, VARLEN)
    found, problem = _try(rows.compare)
    if problem:
        return f"a tiny copy of it cannot be run ({problem})"
    if found.ok:
        return ""
    return f"document 2 of a pack differs from document 2 alone by {max(found.leak, found.difference):.1e}"


def _try(function: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a function returns, or why it fails."""
    try:
        return function(), ""
    # Code of any model, with sizes that may not fit together, raises anything at all; the user sees it.
    except Exception as error:  # noqa: BLE001
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:200]


@contextmanager
def _random_numbers() -> Iterator[None]:
    """Let random numbers begin with a seed; those of the user go on afterwards."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        yield


def _layers_with_state(model: Any) -> tuple[str, ...]:
    """Return the classes of modules that own a convolution or the weights of a recurrence."""
    names = {
        type(module).__name__
        for module in model.modules()
        if any(isinstance(child, torch.nn.Conv1d) for child in module.children())
        or any(name in _STATE_WEIGHTS for name, _ in module.named_parameters(recurse=False))
    }
    return _outermost(model, sorted(names))


def _outermost(model: Any, classes: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of which a module is not inside one of another of these classes."""
    modules = layers_of(model, classes)
    outer = (
        type(module).__name__
        for name, module in modules.items()
        if not any(name.startswith(f"{other}.") for other in modules)
    )
    return tuple(dict.fromkeys(outer))


def _build(model_class: Any, config: Any, settings: Mapping[str, Any]) -> Any:
    tiny = type(config).from_dict(dict(settings))
    text = text_config(tiny)
    if lacking := layer_kinds(text_config(config)).keys() - layer_kinds(text).keys():
        raise ValueError(f"it has no layer of kind {', '.join(sorted(lacking))}")
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in model_class(tiny).parameters())
    if weights > _MOST_WEIGHTS:
        raise ValueError(f"it has {weights:,} weights, more than {_MOST_WEIGHTS:,}")
    set_attention(tiny, "sdpa" if supports_sdpa(model_class) else "eager")
    model = model_class(tiny).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            # Also those that begin as zeros or ones, after which a difference would hide.
            weight.add_(0.1 * torch.randn(weight.shape))
    return model


@dataclass(frozen=True, slots=True)
class _Comparison:
    leak: float
    difference: float
    floor: float
    control: float

    @property
    def allowed(self) -> float:
        return _FACTOR * self.floor

    @property
    def ok(self) -> bool:
        return self.leak <= self.allowed and self.difference <= self.allowed


class _Rows:
    """Two documents, which a model computes alone and in one row."""

    def __init__(self, model: Any) -> None:
        self.model = model
        config = text_config(model.config)
        size = min(getattr(config, "vocab_size", None) or 100, 100)
        generator = torch.Generator().manual_seed(1)
        self.documents = torch.randint(4, size, (3, 1, _FIRST + _SECOND), generator=generator)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def pack_logits(
        self, first: int = 0, lengths: tuple[int, int] = _LENGTHS[0], keep_apart: bool = True
    ) -> torch.Tensor:
        """Return the logits of document 2 after document 1, which is one of two."""
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        ids = torch.cat([self.documents[first][:, : lengths[0]], self.documents[2][:, : lengths[1]]], 1)
        documents = lengths if keep_apart else (sum(lengths),)
        logits = self._logits(input_ids=ids, position_ids=positions, **self._separate(documents))
        return logits[0, lengths[0] :]

    def _separate(self, lengths: Sequence[int]) -> dict[str, Any]:
        """Return the inputs that separate the documents of a row for the model's attention."""
        attention = attention_of(self.model)
        if attention == VARLEN:
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            return {
                "cu_seq_lens_q": ends,
                "cu_seq_lens_k": ends,
                "max_length_q": max(lengths),
                "max_length_k": max(lengths),
            }
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        seen = (numbers[:, None] == numbers).tril()
        mask: torch.Tensor = seen
        if attention == "eager":
            mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return {"attention_mask": mask[None, None]}

    def _logits(self, **inputs: Any) -> torch.Tensor:
        if not self.takes_positions:
            del inputs["position_ids"]
        with torch.no_grad():
            logits: torch.Tensor = self.model(**inputs, use_cache=False).logits
        return logits

    def compare(self) -> _Comparison:
        """Compare document 2 in a row with itself after another document, and alone."""
        found = [self._compare(lengths) for lengths in _LENGTHS]
        worst = {name: max(getattr(one, name) for one in found) for name in ("leak", "difference", "floor")}
        return _Comparison(**worst, control=min(one.control for one in found))

    def _compare(self, lengths: tuple[int, int]) -> _Comparison:
        second = self.documents[2][:, : lengths[1]]
        positions = torch.arange(lengths[1])[None]
        alone = self._logits(input_ids=second, position_ids=positions)[0]
        pair = torch.cat([second, self.documents[0][:, : lengths[1]]])
        together = self._logits(input_ids=pair, position_ids=positions.expand(2, -1))[0]
        packed = self.pack_logits(0, lengths)
        unit = torch.finfo(torch.float32).eps * float(alone.abs().max())
        controls = (self.pack_logits(first, lengths, keep_apart=False) for first in (0, 1))
        return _Comparison(
            leak=_difference(self.pack_logits(1, lengths), packed),
            difference=_difference(packed, alone),
            floor=max(_UNITS * unit, _difference(together, alone)),
            control=_difference(*controls),
        )

    def leaking_layers(self, allowed: float) -> tuple[str, ...]:
        """Return the classes of the innermost modules that let document 1 change document 2."""
        with _record_calls(self.model) as calls:
            self.pack_logits(0)
            count = len(calls)
            self.pack_logits(1)
        if len(calls) != 2 * count:
            return ()
        found: dict[str, str] = {}
        for (name, taken, given), (_, taken_then, given_then) in zip(
            calls[:count], calls[count:], strict=True
        ):
            same = all(_difference(a, b) <= allowed for a, b in zip(taken, taken_then, strict=True))
            changed = any(_difference(a, b) > allowed for a, b in zip(given, given_then, strict=True))
            # Modules end before those that contain them, which are then not the innermost.
            contains = any(inner.startswith(f"{name}.") or not name for inner in found)
            if taken and same and changed and not contains:
                found[name] = type(self.model.get_submodule(name)).__name__
        return tuple(dict.fromkeys(found.values()))


Call = tuple[str, list[torch.Tensor], list[torch.Tensor]]


@contextmanager
def _record_calls(model: Any) -> Iterator[list[Call]]:
    """Record what every module takes and gives for document 2, in the order in which the calls end."""
    calls: list[Call] = []

    def hook(name: str) -> Callable[..., None]:
        def record(module: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
            taken = [part for value in (*arguments, *options.values()) for part in _of_second(value)]
            given = list(_of_second(output))
            if given:
                calls.append((name, taken, given))

        return record

    handles = [
        module.register_forward_hook(hook(name), with_kwargs=True) for name, module in model.named_modules()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _of_second(value: Any) -> Iterator[torch.Tensor]:
    """Yield the part of document 2 of tensors [1, S, …] in a value."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 1 and value.shape[0] == 1 and value.shape[1] == _FIRST + _SECOND:
            yield value[0, _FIRST:].detach().float().clone()
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _of_second(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _of_second(part)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference; infinite if one of them has a NaN."""
    if not a.numel():
        return 0.0
    value = float((a - b).abs().max())
    return value if value == value else float("inf")
