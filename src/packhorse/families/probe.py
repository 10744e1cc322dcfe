"""Measure on a tiny copy of a model whether packing mixes documents, and which layers do it; and its logits.

Two documents go through the model in one row, with the mask of packed batches. Then the first is replaced:
if the second changes, something mixes them. Modules whose input for the second document is the same, but
whose output is not, carry state; :mod:`.stateful` calls these document by document, and the model is measured
once more.

:func:`probe_logits` measures on such a copy whether a model computes the logits of some tokens alone.
"""

from __future__ import annotations

import inspect
import json
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

from packhorse.chat import IGNORE_INDEX
from packhorse.errors import require
from packhorse.families.logits import LogitsChoice, LogitsMode, find_head, logits_inputs, set_logits
from packhorse.families.models import attention_of, set_attention, supports_sdpa, text_config
from packhorse.families.packing import STATE_WEIGHTS, layer_kinds
from packhorse.families.stateful import KERNEL_PACKAGES, install, layers_of
from packhorse.families.tiny import tiny_settings
from packhorse.families.varlen import VARLEN, register_varlen
from packhorse.utils.files import cache_folder, cache_lock, digest, write_atomic

logger = logging.getLogger("packhorse.families.probe")

# Of document 1 and document 2; the first finds the layers. No sum is a size of tiny copies.
_LENGTHS = ((41, 26), (26, 41), (7, 60))
_FIRST, _SECOND = _LENGTHS[0]
_MOST_WEIGHTS = 50_000_000
_FACTOR = 4  # what is allowed, in units of the noise floor
_CONTROL = 20  # a leaking mask changes at least this many times what is allowed
_ROUNDS = 3  # state may be carried by a layer and by another that contains it
_UNITS = 8  # the least noise floor, in units of rounding
_WITHOUT_EFFECT = frozenset({"use_cache", "_name_or_path", "tie_word_embeddings"})
_VERSIONED = frozenset(
    {"transformers", "torch", "builtins"}
)  # packages whose version says what their code is


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
        eager: why packed rows are wrong with eager attention; empty if they are right.
        complete: whether nothing failed. What fails may do so because of this machine, as for lack of memory
            or of a package.
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
    eager: str = ""
    complete: bool = True


@dataclass(frozen=True, slots=True)
class LogitsProbe:
    """What a tiny copy of a model does if the logits of some tokens are requested.

    Attributes:
        one_row: why it does not compute those of the positions in a row; empty if it does.
        several_rows: why it does not compute those of a mask of several rows; empty if it does.
        chunked: why log-probabilities that its head computes in chunks are not right; empty if they are.
        complete: whether nothing failed, as in :class:`Probe`.
    """

    one_row: str = ""
    several_rows: str = ""
    chunked: str = ""
    complete: bool = True


Result = TypeVar("Result", Probe, LogitsProbe)


def probe(model_class: Any, config: Any) -> Probe:
    """Return what a tiny copy of a model does; measured once for each class and kind of config.

    Complete results for classes of transformers are kept on disk for its version. Other code has no version,
    so it is measured in every process.
    """
    return _measure_once(Probe, measure, model_class, config)


def probe_logits(model_class: Any, config: Any) -> LogitsProbe:
    """Return what a tiny copy of a model does if some logits are requested; measured as :func:`probe`."""
    return _measure_once(LogitsProbe, measure_logits, model_class, config)


def _measure_once(
    kind: type[Result], measure: Callable[..., Result], model_class: Any, config: Any
) -> Result:
    settings: dict[str, Any] = tiny_settings(config.to_dict())
    key = kind, *_key(model_class, config, settings)
    if key not in _RESULTS:
        if _is_of_transformers(model_class, config):
            name = f"{model_class.__module__}.{model_class.__qualname__}"
            transformers: Any = require("transformers", "train")
            versions = (_own_source(), transformers.__version__, torch.__version__)
            file = f"{kind.__name__.lower()}-{digest(*versions, name, key[-1])}.json"
            _RESULTS[key] = _load_or_measure(kind, file, partial(measure, model_class, config, settings))
        else:
            _RESULTS[key] = measure(model_class, config, settings)
    result: Result = _RESULTS[key]
    return result


@cache
def _own_source() -> str:
    """Return a digest of the code that measures: stored results of other code are not used."""
    package = __name__.rpartition(".")[0]
    names = ("logits", "models", "packing", "probe", "stateful", "tiny", "varlen")
    return digest(*(inspect.getsource(sys.modules[f"{package}.{name}"]) for name in names))


def _key(model_class: type, config: Any, settings: Mapping[str, Any]) -> tuple[type, type, str]:
    """Return what identifies a measurement, without settings that change no layer."""
    return model_class, type(config), json.dumps(_of_layers(settings), sort_keys=True, default=str)


def _of_layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _of_layers(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if str(key) not in _WITHOUT_EFFECT and not str(key).endswith("_token_id")
    }


_RESULTS: dict[tuple[type, type, type, str], Any] = {}
_CLASSES: dict[tuple[type, type, str], frozenset[type]] = {}


def module_classes(model_class: Any, config: Any) -> frozenset[type]:
    """Return the classes of the modules that a model of this class builds; none if no tiny copy builds."""
    settings = tiny_settings(config.to_dict())
    key = _key(model_class, config, settings)
    if key not in _CLASSES:
        try:
            with _default_state():
                outline = _build_outline(model_class, _tiny_config(config, settings))
        except _CannotBuild:
            return frozenset()
        _CLASSES[key] = frozenset(type(module) for module in outline.modules())
    return _CLASSES[key]


def _load_or_measure(kind: type[Result], name: str, measure: Callable[[], Result]) -> Result:
    """Return the result in the cache, or measure and keep it; of several processes one measures."""
    path = cache_folder() / name
    with cache_lock(name):
        if (result := _load(kind, path)) is not None:
            return result
        result = measure()
        if result.complete:
            content = json.dumps(asdict(result)).encode()
            try:
                write_atomic(path, lambda file: file.write(content))
            except OSError as error:
                logger.warning("%s cannot be written (%s), so every process measures", path, error)
        return result


def _load(kind: type[Result], path: Path) -> Result | None:
    """Return the result in a file; None if there is no file, or it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s): measuring again", path, error)
        return None
    types = {field.name: list if field.name == "layers" else type(field.default) for field in fields(kind)}
    if not isinstance(content, dict) or {key: type(value) for key, value in content.items()} != types:
        logger.warning("%s is damaged: measuring again", path)
        return None
    layers = {"layers": tuple(content["layers"])} if "layers" in content else {}
    return kind(**{**content, **layers})


def _is_of_transformers(model_class: Any, config: Any) -> bool:
    """Whether all code of a model is of transformers: of layers too, which may be registered or replaced."""
    modules = module_classes(model_class, config)
    classes = modules.union(_config_classes(config))
    packages = {base.__module__.partition(".")[0] for kind in classes for base in kind.__mro__}
    return bool(modules) and packages <= _VERSIONED


def _config_classes(config: Any) -> Iterator[type]:
    """Yield the classes of a config and of the configs in it."""
    yield type(config)
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from _config_classes(value)


def measure(model_class: Any, config: Any, settings: Mapping[str, Any] | None = None) -> Probe:
    """Build a tiny copy of a model with random weights, and measure it on the CPU in float32."""
    logger.info("measuring on a tiny copy whether %s can be packed", model_class.__name__)
    try:
        with _tiny_rows(model_class, config, settings) as rows:
            return _measure(rows)
    except (_CannotBuild, _CannotRun) as error:
        return Probe(problem=_describe_failure(error), complete=False)


def measure_logits(model_class: Any, config: Any, settings: Mapping[str, Any] | None = None) -> LogitsProbe:
    """As :func:`measure`, for the logits of some tokens."""
    logger.info("measuring on a tiny copy which logits %s computes", model_class.__name__)
    try:
        with _tiny_rows(model_class, config, settings) as rows:
            return _measure_logits(rows)
    except (_CannotBuild, _CannotRun) as error:
        why = _describe_failure(error)
        return LogitsProbe(why, why, why, complete=False)


@contextmanager
def _tiny_rows(model_class: Any, config: Any, settings: Mapping[str, Any] | None) -> Iterator[_Rows]:
    """Build a tiny copy with which to measure."""
    settings = tiny_settings(config.to_dict()) if settings is None else settings
    with _default_state():
        tiny = _tiny_config(config, settings)
        outline = _build_outline(model_class, tiny)
        with _reference_functions(outline):
            yield _Rows(_build(model_class, tiny))


def _describe_failure(error: _CannotBuild | _CannotRun) -> str:
    what = "built" if isinstance(error, _CannotBuild) else "run"
    return f"a tiny copy of it cannot be {what} ({error})"


class _CannotBuild(Exception):
    """A tiny copy cannot be built; the message is the reason."""


class _CannotRun(Exception):
    """A tiny copy cannot be run, or does not return logits for each token; the message is the reason."""


@contextmanager
def _code_of_model(failure: type[_CannotBuild | _CannotRun]) -> Iterator[None]:
    """Turn what the code of a model raises into one kind of exception."""
    try:
        yield
    # Code of any model, with sizes that may not fit together, raises anything at all; the user sees it.
    except Exception as error:
        raise failure(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error


@contextmanager
def _default_state() -> Iterator[None]:
    """Compute on the CPU in float32, without gradients and autocast, with random numbers that are fixed.

    The defaults of the process and its random numbers are those of the user again afterwards.
    """
    dtype, numbers, legacy_numbers = torch.get_default_dtype(), random.getstate(), np.random.get_state()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.random.fork_rng(devices=()),
        ):
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the user's GPUs as well
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        torch.set_default_dtype(dtype)
        random.setstate(numbers)
        np.random.set_state(legacy_numbers)


def _measure(rows: _Rows) -> Probe:
    try:
        before = rows.compare()
    except _CannotRun as error:
        # Models without attention reject the mask of packed rows, which their layers do not need.
        layers = _layers_with_state(rows.model)
        if not layers:
            raise
        return _measure_separated(rows, layers, {}, f"a packed row cannot be run ({error})")
    if before.control <= _CONTROL * before.allowed:
        why = f"a mask that leaks changes logits by {before.control:.1e}, rounding by {before.floor:.1e}"
        return Probe(problem=f"a tiny copy of it cannot show it: {why}", floor=before.floor, complete=False)
    numbers: dict[str, Any] = {"floor": before.floor, "control": before.control, "unhandled": before.leak}
    if before.ok:
        numbers |= {"leak": before.leak, "difference": before.difference}
        return Probe(**_measure_other_attention(rows), **numbers)
    numbers |= {"leak": before.leak, "difference": before.difference}
    what = f"document 2 of a pack changes by {before.leak:.1e} when document 1 is replaced"
    if before.leak <= before.allowed:
        what = f"document 2 of a pack differs from document 2 alone by {before.difference:.1e}"
    if layers := rows.leaking_layers(before.allowed):
        return _measure_separated(rows, layers, numbers, what)
    if layers := rows.layers_unlike_alone(before.allowed):
        what += f", first in {', '.join(layers)}"
    return Probe(problem=what, wrong=True, **numbers)


def _measure_separated(rows: _Rows, layers: tuple[str, ...], numbers: dict[str, Any], what: str) -> Probe:
    """Measure with these layers, and those that contain them if need be, called document by document."""
    for _ in range(_ROUNDS):
        install(rows.model, layers)
        try:
            after = rows.compare()
        except _CannotRun as error:
            names = ", ".join(layers)
            why = f"{what}: {names} cannot be called document by document ({error})"
            return Probe(problem=why, wrong=bool(numbers), complete=False, **numbers)
        numbers = {"floor": after.floor, "control": after.control} | numbers
        numbers |= {"leak": after.leak, "difference": after.difference}
        others = () if after.ok else rows.leaking_layers(after.allowed)
        if not others:
            break
        layers = _outermost(rows.model, (*layers, *others))
    if after.ok:
        return Probe(layers, **_measure_other_attention(rows), **numbers)
    remains = max(after.leak, after.difference)
    why = f"{what}; with {', '.join(layers)} called document by document, by {remains:.1e}"
    return Probe(problem=why, wrong=True, **numbers)


def _measure_other_attention(rows: _Rows) -> dict[str, Any]:
    """Return the fields of a result for attention that a model may run instead of that of its tiny copy."""
    fields: dict[str, Any] = {}
    try:
        if attention_of(rows.model) != "eager":
            set_attention(rows.model, "eager")
            if why := _describe_mixing(rows.compare()):
                fields["eager"] = why
    except _CannotRun:  # nor can the model itself, whose user sees why
        fields["complete"] = False
    try:
        register_varlen()
        set_attention(rows.model, VARLEN)
        fields["varlen"] = _describe_mixing(rows.compare())
    except _CannotRun as error:
        fields |= {"varlen": f"a tiny copy of it cannot be run ({error})", "complete": False}
    return fields


def _measure_logits(rows: _Rows) -> LogitsProbe:
    """Ask for logits in all ways, and compare their shape and values with those of all tokens."""
    ids = rows.documents[:2, 0, :_FIRST]
    labels = ids.roll(-1, 1).masked_fill(torch.arange(ids.numel()).view(ids.shape) % 3 == 0, IGNORE_INDEX)
    positions = torch.arange(_FIRST)[None].expand(ids.shape)
    every = rows.logits(input_ids=ids, position_ids=positions)
    alone = rows.logits(input_ids=ids[:1], position_ids=positions[:1])
    unit = torch.finfo(torch.float32).eps * float(every.abs().max())
    allowed = _FACTOR * max(_UNITS * unit, _difference(alone[0], every[0]))
    problems = dict[str, Any]()
    ways: tuple[tuple[str, LogitsMode, int], ...] = (
        ("one_row", "supervised", 1),
        ("several_rows", "supervised", 2),
        ("chunked", "chunked", 1),
    )
    for name, mode, count in ways:
        if mode == "chunked" and not find_head(rows.model):
            problems[name] = "it has no output embeddings"
            continue
        kept = labels[:count] != IGNORE_INDEX
        expected, control = every[:count][kept], every[:count].roll(1, 1)[kept]
        if mode == "chunked":
            target = labels[:count][kept][:, None]
            expected, control = (part.log_softmax(-1).gather(1, target)[:, 0] for part in (expected, control))
        try:
            set_logits(rows.model, LogitsChoice(mode))
            inputs = logits_inputs(LogitsChoice(mode), labels[:count], int(kept.sum()))
            found = rows.run(input_ids=ids[:count], position_ids=positions[:count], **inputs)
        except _CannotRun as error:
            problems[name] = str(error)
            continue
        shape = (1, *expected.shape) if name == "one_row" else expected.shape
        problems[name] = _describe_logits(found, shape, expected, control, allowed)
    return LogitsProbe(**problems)


def _describe_logits(
    found: Any, shape: Sequence[int], expected: torch.Tensor, control: torch.Tensor, allowed: float
) -> str:
    """Return why logits are not those that were requested; empty if they are."""
    if not isinstance(found, torch.Tensor) or found.shape != torch.Size(shape):
        return f"it returns {list(getattr(found, 'shape', ()))} instead of {list(shape)}"
    if (difference := _difference(found.reshape(expected.shape), expected)) > allowed:
        return f"what it returns differs by {difference:.1e} from all logits, rounding by {allowed:.1e}"
    if (difference := _difference(control, expected)) <= _CONTROL * allowed:
        return f"logits of other tokens differ by {difference:.1e} only, rounding by {allowed:.1e}"
    return ""


def _describe_mixing(result: _Comparison) -> str:
    """Return how much documents change each other; empty if no more than rounding does."""
    if result.ok:
        return ""
    return f"document 2 of a pack differs from document 2 alone by {max(result.leak, result.difference):.1e}"


def _layers_with_state(model: Any) -> tuple[str, ...]:
    """Return the classes of modules that own a convolution or the weights of a recurrence."""
    names = {
        type(module).__name__
        for module in model.modules()
        if any(isinstance(child, torch.nn.Conv1d) for child in module.children())
        or any(name in STATE_WEIGHTS for name, _ in module.named_parameters(recurse=False))
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


def _tiny_config(config: Any, settings: Mapping[str, Any]) -> Any:
    with _code_of_model(_CannotBuild):
        tiny = type(config).from_dict(dict(settings))
    if lacking := layer_kinds(text_config(config)).keys() - layer_kinds(text_config(tiny)).keys():
        raise _CannotBuild(f"it has no layer of kind {', '.join(sorted(lacking))}")
    return tiny


def _build_outline(model_class: Any, tiny: Any) -> Any:
    """Build a tiny copy without weights."""
    with _code_of_model(_CannotBuild), torch.device("meta"):
        outline = model_class(tiny)
    weights = sum(weight.numel() for weight in outline.parameters())
    if weights > _MOST_WEIGHTS:
        raise _CannotBuild(f"it has {weights:,} weights, more than {_MOST_WEIGHTS:,}")
    return outline


def _build(model_class: Any, tiny: Any) -> Any:
    set_attention(tiny, "sdpa" if supports_sdpa(model_class) else "eager")
    with _code_of_model(_CannotBuild):
        model = model_class(tiny).float().eval()
    for weight in model.parameters():
        # Also those that begin as zeros or ones, after which a difference would hide.
        weight.add_(0.1 * torch.randn(weight.shape))
    return model


@contextmanager
def _reference_functions(model: Any) -> Iterator[None]:
    """Let the modules of a model compute in PyTorch what kernels of other packages would compute on a GPU.

    transformers has no public way to do without installed kernels: it chooses them when it is imported, or
    when a model is built, for tensors on any device. So their names in the files of the model's classes get
    the functions that transformers uses without these packages.
    """
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    names = {name for name in names if name.partition(".")[0] not in {"builtins", "torch", *KERNEL_PACKAGES}}
    files = [sys.modules[name] for name in names if name in sys.modules]
    before: list[tuple[ModuleType, dict[str, Any]]] = []
    try:
        for file in files:
            values = dict(vars(file))
            references = {name: _reference(name, value) for name, value in values.items() if callable(value)}
            references |= {"is_fast_path_available": False} if "is_fast_path_available" in values else {}
            replaced = {name: value for name, value in references.items() if value is not values[name]}
            # Versions of transformers that choose kernels for each model set other names meanwhile.
            restored = values if file.__name__.startswith("transformers.models.") else dict.fromkeys(replaced)
            before.append((file, {name: values[name] for name in restored}))
            vars(file).update(replaced)
        yield
    finally:
        for file, values in before:
            vars(file).update(values)


def _reference(name: str, value: Any) -> Any:
    """Return the value of a global name where no package with kernels is installed."""
    if name == "lazy_load_kernel":
        return lambda kernel: None
    if (wrapper := _kernel_wrapper(value)) is not None:
        function = wrapper.__wrapped__
        parameters = inspect.signature(function).parameters

        def compute(*arguments: Any, **options: Any) -> Any:
            # As transformers does: layers pass what only kernels take.
            return function(*arguments, **{key: value for key, value in options.items() if key in parameters})

        return compute
    package = str(getattr(value, "__module__", "")).partition(".")[0]
    return None if package in KERNEL_PACKAGES and not name.endswith("_ref") else value


def _kernel_wrapper(value: Any) -> Any | None:
    """Return the function by which transformers calls a kernel or the PyTorch function of that name.

    With the package ``kernels`` it is a module, whose forward pass calls the function.
    """
    if isinstance(value, torch.nn.Module):
        cells = getattr(type(value).forward, "__closure__", None) or ()
        return next((cell.cell_contents for cell in cells if _is_kernel_wrapper(cell.cell_contents)), None)
    return value if _is_kernel_wrapper(value) else None


def _is_kernel_wrapper(value: Any) -> bool:
    # functools.wraps copies the name and the module of the function, but not its global names.
    return (
        isinstance(value, FunctionType)
        and hasattr(value, "__wrapped__")
        and value.__globals__.get("__name__") == "transformers.integrations.hub_kernels"
    )


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
        logits = self.logits(input_ids=ids, position_ids=positions, **self._separate(documents))
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

    def run(self, **inputs: Any) -> Any:
        """Return what the model gives as logits."""
        if not self.takes_positions:
            del inputs["position_ids"]
        with _code_of_model(_CannotRun):
            return self.model(**inputs, use_cache=False).logits

    def logits(self, **inputs: Any) -> torch.Tensor:
        """Return the logits of all tokens."""
        shape = inputs["input_ids"].shape
        logits = self.run(**inputs)
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != shape:
            sizes = list(getattr(logits, "shape", ()))
            raise _CannotRun(f"its logits {sizes} are not those of its tokens {list(shape)}")
        return logits

    def compare(self) -> _Comparison:
        """Compare document 2 in a row with itself after another document, and alone."""
        results = [self._compare(lengths) for lengths in _LENGTHS]
        names = ("leak", "difference", "floor")
        worst = {name: max(getattr(result, name) for result in results) for name in names}
        return _Comparison(**worst, control=min(result.control for result in results))

    def _compare(self, lengths: tuple[int, int]) -> _Comparison:
        second = self.documents[2][:, : lengths[1]]
        positions = torch.arange(lengths[1])[None]
        alone = self.logits(input_ids=second, position_ids=positions)[0]
        pair = torch.cat([second, self.documents[0][:, : lengths[1]]])
        together = self.logits(input_ids=pair, position_ids=positions.expand(2, -1))[0]
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
        return self._first_that_differ(lambda: self.pack_logits(0), lambda: self.pack_logits(1), allowed)

    def layers_unlike_alone(self, allowed: float) -> tuple[str, ...]:
        """Return the classes of the innermost modules that compute document 2 otherwise than alone."""

        def compute_alone() -> None:
            self.logits(input_ids=self.documents[2][:, :_SECOND], position_ids=torch.arange(_SECOND)[None])

        return self._first_that_differ(lambda: self.pack_logits(0), compute_alone, allowed)

    def _first_that_differ(
        self, compute: Callable[[], Any], compute_otherwise: Callable[[], Any], allowed: float
    ) -> tuple[str, ...]:
        """Return the classes of the innermost modules with the same inputs and different outputs."""
        with _record_calls(self.model) as calls:
            compute()
            count = len(calls)
            compute_otherwise()
        if len(calls) != 2 * count:
            return ()
        found: dict[str, str] = {}
        for (name, taken, given), (_, taken_then, given_then) in zip(
            calls[:count], calls[count:], strict=True
        ):
            same = _all_within(allowed, taken, taken_then)
            changed = not _all_within(allowed, given, given_then)
            # Modules end before those that contain them, which are then not the innermost.
            contains = any(inner.startswith(f"{name}.") or not name for inner in found)
            if taken and same and changed and not contains:
                found[name] = type(self.model.get_submodule(name)).__name__
        return tuple(dict.fromkeys(found.values()))


def _all_within(allowed: float, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in others]:
        return False
    return all(_difference(a, b) <= allowed for a, b in zip(tensors, others, strict=True))


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
    """Yield the part of document 2 of tensors [1, S, …] in a value, which may be document 2 alone."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 1 and value.shape[0] == 1 and value.shape[1] in (_SECOND, _FIRST + _SECOND):
            yield value[0, -_SECOND:].detach().float().clone()
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
