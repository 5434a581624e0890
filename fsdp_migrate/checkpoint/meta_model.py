"""
Ask the user's model for its layout: built on the meta device, where it costs no memory.

The only part of un-flattening that runs torch, and code of the user's. Whatever that code prints
goes to stderr, because stdout is for results.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_migrate.checkpoint.model_layout import Buffer, ModelLayout, Parameter
from fsdp_migrate.errors import MigrateError, SourceError, UsageError


def from_factory(spec: str) -> ModelLayout:
    """
    The layout of the model that `spec`, "package.module:factory", names.

    The factory is a module's class or any callable without arguments; an nn.Module is taken as it
    is. It may return (model, optimizer) too, to tell which parameters are in which param group.
    Modules are found as `python -m` finds them: in the working folder, then on PYTHONPATH.
    """
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"--model {spec}: expected PACKAGE.MODULE:FACTORY")
    origin = f"--model {spec}"
    with _guest(origin):
        module = _imported(module_name, origin)
    found: Any = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise UsageError(
                f"{origin}: {module_name} ({getattr(module, '__file__', None)}) has no {attribute}"
            ) from None
    return from_module(*_built(found, origin), origin)


def from_hf_config(folder: Path) -> ModelLayout:
    """The layout of the transformers model that `folder`/config.json describes."""
    origin = f"--hf-config {folder}"
    config_file = folder / "config.json" if folder.is_dir() else folder
    try:
        named = json.loads(config_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"{config_file}: {error.strerror}") from None
    except ValueError as error:
        raise SourceError(f"{config_file}: not a JSON file ({error})") from None
    if not isinstance(named, dict):
        raise SourceError(f"{config_file}: not a transformers config")
    try:
        import transformers
    except ImportError:
        raise UsageError(
            f"{origin} needs transformers: pip install 'fsdp-migrate[hf]', or use --model or "
            "--layout"
        ) from None
    with _guest(origin):
        config = transformers.AutoConfig.from_pretrained(
            str(config_file), trust_remote_code=False, local_files_only=True
        )
    names = getattr(config, "architectures", None) or []
    if len(names) > 1:
        raise SourceError(f"{config_file}: it names several architectures: {', '.join(names)}")
    if not names:
        raise SourceError(
            f'{config_file}: it names no architecture. Add "architectures": '
            '["LlamaForCausalLM"] (or what yours is), or use --model'
        )
    cls = getattr(transformers, names[0], None)
    if cls is None:
        raise SourceError(
            f"{config_file}: transformers {transformers.__version__} has no {names[0]}; code "
            "beside a config is never run here. Use --model with a factory that builds it"
        )
    return from_module(*_built(lambda: cls._from_config(config), origin), origin)


def from_module(module: Any, optimizer: Any, origin: str) -> ModelLayout:
    """The layout of an nn.Module, on any device; `optimizer` may be None."""
    import torch

    groups = optimizer.param_groups if optimizer is not None else ()
    group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    parameters = []
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if torch.nn.parameter.is_lazy(parameter):
            raise SourceError(
                f"{origin}: {name} has no shape yet (a lazy module); run the factory's model once, "
                "or build it with its sizes"
            )
        same = first.setdefault(id(parameter), name)
        parameters.append(
            Parameter(
                name,
                tuple(parameter.shape),
                None if parameter.is_contiguous() else tuple(parameter.stride()),
                str(parameter.dtype).removeprefix("torch."),
                None if same == name else same,
                bool(parameter.requires_grad),
                group=group_of.get(id(parameter)),
            )
        )
    if not parameters:
        raise SourceError(f"{origin}: the model has no parameters")
    buffers = [
        Buffer(name, tuple(buffer.shape), str(buffer.dtype).removeprefix("torch."))
        for name, buffer in module.named_buffers(remove_duplicate=False)
    ]
    return ModelLayout(tuple(parameters), tuple(buffers), origin)


def _imported(name: str, origin: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"{origin}: no module {error.name} in {here} or on PYTHONPATH"
            ) from None
        raise


def _built(found: Any, origin: str) -> tuple[Any, Any]:
    """The module, and the optimizer or None."""
    import torch

    if isinstance(found, torch.nn.Module):
        return found, None
    if not callable(found):
        raise UsageError(
            f"{origin}: a {type(found).__name__} is neither an nn.Module nor can it be called"
        )
    with _guest(origin), torch.device("meta"):
        built = found()
    optimizer = None
    if isinstance(built, tuple) and len(built) == 2:
        built, optimizer = built
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"{origin}: it returns a pair whose second is a {type(optimizer).__name__}, not an "
                "optimizer"
            )
    if not isinstance(built, torch.nn.Module):
        raise UsageError(f"{origin}: it returns a {type(built).__name__}, not an nn.Module")
    return built, optimizer


@contextlib.contextmanager
def _guest(origin: str) -> Iterator[None]:
    """Runs code that is not ours: any way it fails is a message."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (MigrateError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = _place(error)
        raise SourceError(
            f"{origin}: it raised {type(error).__name__}: {error}{place}. It is run on the meta "
            "device: build the model from its config there, load no weights and read no values"
        ) from error


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
