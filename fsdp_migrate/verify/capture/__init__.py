"""
What a rank does to an unmodified script so that its training can be compared.

    session.py      the record of the run so far: steps, and when it is over
    models.py       which modules FSDP manages, what parameters are called
    pieces.py       which elements of them this rank holds
    fingerprint.py  a tensor as numbers that do not depend on sharding
    recorder.py     JSON lines
    patch.py        replacing a function everywhere it is known

Each of the others is one thing that is watched or replaced, with an `install(session)`:

    forwards.py     inputs and random state at root forwards; a model's first forward
    losses.py       backward, GradScaler
    optimizers.py   optimizer steps: hyperparameters, gradients, state
    clipping.py     clip_grad_norm_, also with an fp64 norm (exact mode)
    collectives.py  gradient reductions summed in rank order (exact mode)
    precision.py    every lower precision lifted to fp32
    weights.py      initial weights kept and replayed
    saves.py        checkpoints and trackers kept away from the user's files
    process_groups.py  process groups are left to the end of the process
    cuda_on_cpu.py  CUDA calls on a machine without CUDA
    fsdp1_on_cpu.py what FSDP1 asks of a device and the CPU cannot give
    accelerate_on_cpu.py  what accelerate leaves out on CPUs
    after_import.py acting on a library once the script imports it
    rounding.py     the control: gradients moved by a rounding
"""
