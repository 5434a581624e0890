"""
Functions written into the user's file where FSDP2 has no one-line equivalent.

Each is self-contained, named for what it does, and put once after the imports.
"""

from __future__ import annotations

from textwrap import dedent

from fsdp_migrate.rewrite.file import File


def _add(file: File, name: str, text: str) -> str:
    return file.needs.snippet(name, dedent(text).strip())


def _tensor_home(file: File) -> str:
    """Where DTensor lives; its home became public with torch 2.5."""
    old = file.options.target_torch < (2, 5)
    return "torch.distributed._tensor" if old else "torch.distributed.tensor"


def shard_units(file: File) -> str:
    shard = file.fsdp2("fully_shard", file.tree.module)
    return _add(
        file,
        "shard_units",
        f'''
        def shard_units(model, is_unit, **fsdp_kwargs):
            """fully_shard the submodules that `is_unit` picks, children first, then the model."""
            for module in reversed(list(model.modules())):
                if module is not model and is_unit(module):
                    {shard}(module, **fsdp_kwargs)
            return {shard}(model, **fsdp_kwargs)
        ''',
    )


def shard_by_policy(file: File, *, init: bool = False) -> str:
    shard = file.fsdp2("fully_shard", file.tree.module)
    name = "shard_by_policy"
    start = f"{materialize(file)}(module, init_fn)" if init else ""
    text = dedent(
        f'''
        def {name}(model, policy=None, *, root=False, init_fn=None, **fsdp_kwargs):
            """fully_shard the submodules that an FSDP1 auto_wrap_policy would have wrapped."""
            seen = set()

            def visit(module, is_root):
                seen.add(module)
                numel = sum(param.numel() for param in module.parameters())
                if not policy(module=module, recurse=True, nonwrapped_numel=numel):
                    return 0
                children = [child for child in module.children() if child not in seen]
                wrapped = sum(visit(child, False) for child in children)
                rest = numel - wrapped
                if not is_root and policy(module=module, recurse=False, nonwrapped_numel=rest):
                    {start or "pass"}
                    {shard}(module, **fsdp_kwargs)
                    return numel
                return wrapped

            if policy is not None:
                visit(model, True)
            return {shard}(model, **fsdp_kwargs) if root else model
        '''
    )
    if not init:
        text = text.replace("                    pass\n", "").replace(", init_fn=None", "")
        text = text.replace("            pass\n", "")
    return _add(file, name, text)


def materialize(file: File) -> str:
    kind = file.fsdp2("FSDPModule", file.tree.module)
    return _add(
        file,
        "materialize",
        f'''
        def materialize(unit, init_fn):
            """Run `init_fn` on the modules of a unit that has meta tensors, in FSDP1's order."""
            own = {{unit: None}}
            for part in (queue := [unit]):
                for child in part.children():
                    if child not in own and not isinstance(child, {kind}):
                        own[child] = queue.append(child)
            tensors = [t for part in own for t in part._parameters.values() if t is not None]
            tensors += [t for part in own for t in part._buffers.values() if t is not None]
            if init_fn is not None and any(tensor.is_meta for tensor in tensors):
                for part in own:
                    init_fn(part)
        ''',
    )


def sharding_arguments(file: File) -> str:
    top = file.tree.module
    init = file.name("torch.distributed.device_mesh.init_device_mesh", top)
    world = file.name("torch.distributed.get_world_size", top)
    count = file.name("torch.cuda.device_count", top)
    return _add(
        file,
        "sharding_arguments",
        f'''
        def sharding_arguments(strategy, device_type="cuda", mesh=None):
            """The arguments of fully_shard that mean FSDP1's sharding strategy of this name."""
            name = getattr(strategy, "name", strategy) or "FULL_SHARD"
            world = {world}()
            node = {count}() if device_type == "cuda" else 1
            shapes = {{
                "FULL_SHARD": (world,),
                "SHARD_GRAD_OP": (world,),
                "HYBRID_SHARD": (world // node, node),
                "_HYBRID_SHARD_ZERO2": (world // node, node),
                "NO_SHARD": (world, 1),
            }}
            if name not in shapes:
                raise ValueError(f"unknown sharding strategy {{strategy!r}}")
            if mesh is None:
                names = ("replicate", "shard")[-len(shapes[name]):]
                mesh = {init}(device_type, shapes[name], mesh_dim_names=names)
            if name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
                return {{"mesh": mesh, "reshard_after_forward": False}}
            return {{"mesh": mesh}}
        ''',
    )


def load_from_rank0(file: File) -> str:
    top = file.tree.module
    home = "torch.distributed.checkpoint.state_dict"
    options = file.name(f"{home}.StateDictOptions", top)
    put = file.name(f"{home}.set_model_state_dict", top)
    broadcast = file.name("torch.distributed.broadcast", top)
    dtensor = file.name(f"{_tensor_home(file)}.DTensor", top)
    return _add(
        file,
        "load_from_rank0",
        f'''
        def load_from_rank0(model, full_state, device=None):
            """Give every rank the weights and buffers rank 0 had; meta tensors go to `device`."""
            for module in model.modules():
                tensors = [*module._parameters.values(), *module._buffers.values()]
                if any(tensor is not None and tensor.is_meta for tensor in tensors):
                    module.to_empty(device=device, recurse=False)
            # Units that are sharded already have rank 0's values.
            whole = {{name: t for name, t in full_state.items() if not isinstance(t, {dtensor})}}
            {put}(
                model,
                whole,
                options={options}(full_state_dict=True, broadcast_from_rank0=True, strict=False),
            )
            for buffer in model.buffers():
                {broadcast}(buffer, src=0)
        ''',
    )


def shard_from_meta(file: File) -> str:
    shard = file.fsdp2("fully_shard", file.tree.module)
    kind = file.fsdp2("FSDPModule", file.tree.module)
    first = materialize(file)
    return _add(
        file,
        "shard_from_meta",
        f'''
        def shard_from_meta(model, is_unit, init_fn, **fsdp_kwargs):
            """fully_shard the units, then the model; before each, `init_fn` on its meta modules."""

            def shard(module):
                for child in module.children():
                    if not isinstance(child, {kind}):
                        shard(child)
                if module is model or (is_unit is not None and is_unit(module)):
                    {first}(module, init_fn)
                    {shard}(module, **fsdp_kwargs)

            shard(model)
            return model
        ''',
    )


def no_sync(file: File, *, sure: bool) -> str:
    manager = file.name("contextlib.contextmanager", file.tree.module)
    if sure:
        return _add(
            file,
            "no_sync",
            f'''
            @{manager}
            def no_sync(model):
                """Accumulate gradients on each rank, as FSDP1's no_sync did."""
                model.set_requires_gradient_sync(False)
                try:
                    yield
                finally:
                    model.set_requires_gradient_sync(True)
            ''',
        )
    kind = file.fsdp2("FSDPModule", file.tree.module)
    return _add(
        file,
        "no_sync",
        f'''
        @{manager}
        def no_sync(model):
            """Accumulate gradients on each rank, for FSDP2 models and for others with no_sync()."""
            if not isinstance(model, {kind}):
                with model.no_sync():
                    yield
                return
            model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                model.set_requires_gradient_sync(True)
        ''',
    )


def full_params(file: File) -> str:
    top = file.tree.module
    manager = file.name("contextlib.contextmanager", top)
    kind = file.name(f"{_tensor_home(file)}.DTensor", top)
    spread = file.name(f"{_tensor_home(file)}.distribute_tensor", top)
    parameter = file.name("torch.nn.Parameter", top)
    no_grad = file.name("torch.no_grad", top)
    return _add(
        file,
        "full_params",
        f'''
        @{manager}
        def full_params(model, writeback=True, offload_to_cpu=False):
            """Put whole parameters in place of the shards, as FSDP1's summon_full_params did."""
            whole, places = {{}}, []
            for module in model.modules():
                for name, param in module._parameters.items():
                    if isinstance(param, {kind}):
                        places.append((module, name, param))
                        if param not in whole:
                            full = param.detach().full_tensor()
                            full = full.cpu() if offload_to_cpu else full
                            whole[param] = {parameter}(full, requires_grad=param.requires_grad)
            for module, name, param in places:
                module._parameters[name] = whole[param]
            try:
                yield
            finally:
                for module, name, param in places:
                    module._parameters[name] = param
                if writeback:
                    with {no_grad}():
                        for param, full in whole.items():
                            mesh, placements = param.device_mesh, param.placements
                            full = full.detach().to(param.to_local().device)
                            param.copy_({spread}(full, mesh, placements))
        ''',
    )


def reset_module(file: File) -> str:
    no_grad = file.name("torch.no_grad", file.tree.module)
    return _add(
        file,
        "reset_module",
        f'''
        def reset_module(module, device):
            """Give a meta module memory and its own initial values, as FSDP1 did."""
            if module._parameters or module._buffers:
                module.to_empty(device=device, recurse=False)
                with {no_grad}():
                    module.reset_parameters()
        ''',
    )


def reshard(file: File) -> str:
    kind = file.fsdp2("FSDPModule", file.tree.module)
    return _add(
        file,
        "reshard",
        f'''
        def reshard(model):
            """Put the shards back after a forward pass that no backward follows."""
            for module in model.modules():
                if isinstance(module, {kind}):
                    module.reshard()
        ''',
    )


def shard_from_rank0(file: File) -> str:
    load = load_from_rank0(file)
    rank = file.name("torch.distributed.get_rank", file.tree.module)
    return _add(
        file,
        "shard_from_rank0",
        f'''
        def shard_from_rank0(shard, model, *args, **fsdp_kwargs):
            """Shard a model and give every rank the weights that rank 0 had before."""
            full_state = model.state_dict() if {rank}() == 0 else {{}}
            model = shard(model, *args, **fsdp_kwargs)
            {load}(model, full_state)
            return model
        ''',
    )
