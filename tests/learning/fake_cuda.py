"""A GPU without a GPU: CPU tensors are real, cuda tensors have a shape and no contents (FakeTensor).

    python tests/learning/fake_cuda.py FOLDER '["read"]' FLAGS

trains the phases of a recipe by the real loop, evaluates, labels and exports, and prints as JSON what a GPU would wait
for or refuse: tensors of two devices in one operation, double precision (Apple's GPUs have none), numbers and tensors
that are read back, copies that block. The backward pass is left out (autograd's engine asks for a device): every
gradient is an empty tensor.
"""

import json
import os
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda:0")
ROOT = Path(__file__).resolve().parent.parent.parent
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)


class FakeGPU(TorchDispatchMode):
    """Sends operations on cuda tensors to FakeTensorMode, all others to the CPU, and notes what a GPU waits for."""

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.found = Counter()
        self.kernels = Counter()

    def __enter__(self):
        self.fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def note(self, what):
        """Count what happened, with the line of ours that did it."""
        frames = [frame for frame in traceback.extract_stack() if "finetune_mile/" in frame.filename]
        scaler = any(frame.filename.endswith("grad_scaler.py") for frame in traceback.extract_stack())
        place = frames[-1] if frames else None
        where = "elsewhere" if place is None else f"{Path(place.filename).name}:{place.name}"
        self.found[f"{what} in {'GradScaler, ' if scaler else ''}{where}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        on_gpu = [t for t in tensors if isinstance(t, FakeTensor)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        if not on_gpu and (target is None or target.type == "cpu"):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self.note("a number is read")
            return False if args[0].dtype is torch.bool else 0
        if func is aten._to_copy.default and target is not None and target.type == "cpu":
            self.note("a tensor is read back")
            with _disable_current_modes():
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        here = [t for t in tensors if not isinstance(t, FakeTensor)]
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            self.note("a tensor is read back")
            return args[0]
        if func in COPIES:
            waits = not (kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:3] == (True,)))
            if here and here[0].ndim and (waits or not getattr(here[0], "pinned", False)):
                self.note("a copy to the device blocks")
        elif any(t.ndim for t in here):  # a number on the CPU may be used anywhere
            self.note(f"devices are mixed by {func}")
        self.kernels[str(func)] += 1
        if "_fused_sgd_" in str(func):  # in place, and without a form for fake tensors
            return None
        if func not in COPIES:  # go on as if a tensor on the CPU had been on the GPU
            args, kwargs = tree_map(lambda t: self.moved(t) if any(t is h for h in here) else t, (args, kwargs))
        with self.fake:
            result = func(*args, **kwargs)
        if any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_flatten(result)[0]):
            self.note("float64, which Apple's GPUs do not have,")
        return result

    def moved(self, tensor):
        """A number may stay on the CPU."""
        with self.fake:
            return torch.empty_like(tensor, device=GPU) if tensor.ndim else self.fake.from_tensor(tensor)


def pretend():
    """Let torch and Accelerate believe in a GPU, as far as the simulation needs it."""
    import accelerate
    from accelerate.state import PartialState

    from finetune_mile.images import pipeline
    from finetune_mile.training import processes

    torch.cuda.is_available = lambda: False
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    processes.uses_gpu = lambda: True
    processes.use_threads = lambda: 1
    PartialState(cpu=True)
    PartialState._shared_state["device"] = GPU

    class Loader(pipeline.DataLoader):
        """Pinned memory needs a driver: tensors are marked instead."""

        def __init__(self, *words, pin_memory, **more):
            super().__init__(*words, pin_memory=False, **more)
            self.pins = pin_memory

        def __iter__(self):
            for batch, bad in super().__iter__():
                for tensor in batch:
                    if tensor is not None and self.pins:
                        tensor.pinned = True
                yield batch, bad

    def pin_memory(tensor):
        copied = tensor.clone()
        copied.pinned = True
        return copied

    def backward(accelerator, loss, **_):
        if accelerator.scaler is not None:
            accelerator.scaler.scale(loss)
        for model in accelerator._models:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)

    move = torch.nn.Module.to

    def to(module, *words, **more):  # fake tensors cannot be moved where they are
        there = any(isinstance(tensor, FakeTensor) for tensor in module.parameters())
        return module if there else move(module, *words, **more)

    torch.nn.Module.to = to
    pipeline.DataLoader = Loader
    torch.Tensor.pin_memory = pin_memory
    accelerate.Accelerator.backward = backward
    torch.autograd.grad = lambda outputs, inputs, *_, **__: (torch.empty_like(inputs),)


class Silent:
    """A monitor that looks at nothing."""

    def on_step(self, record):
        self.step = record.step

    def on_decision(self, step, decision):
        pass


def make_mistakes(names):
    """What must be found."""
    from finetune_mile.learning.loop import LabelObjective
    from finetune_mile.training.processes import Device

    backward, prepare = LabelObjective.backward, Device.prepare
    ours = {
        "mixed": lambda images: images * torch.ones(3, 1, 1),
        "double": lambda images: images.double().float(),
        "blocking": lambda images: images + torch.tensor([0.0], device=GPU),
    }

    def reads(objective, loop, batch, record):
        backward(objective, loop, batch, record)
        record.loss.item()

    if "read" in names:
        LabelObjective.backward = reads

    def worse(device, images, preprocess):
        images = prepare(device, images, preprocess)
        for name in names:
            images = ours.get(name, lambda same: same)(images)
        return images

    Device.prepare = worse


def play(folder, mistakes, flags):
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(ROOT)]
    from finetune_mile.checkpoints.init import parse_init, parse_source
    from finetune_mile.config.flags import parse
    from finetune_mile.config.resolve import resolve
    from finetune_mile.training.explain import SWITCHES
    from finetune_mile.training.folder import RunFolder
    from finetune_mile.training.labelling import pool_labeller
    from finetune_mile.training.processes import Signals
    from finetune_mile.training.start import scores_to_beat, start_head
    from finetune_mile.training.steps import make_loop
    from finetune_mile.training.task import feed, set_up

    options = parse(flags)
    recipe = resolve(options.given, options.sets).recipe
    gpu = FakeGPU()
    pretend()
    make_mistakes(mistakes)
    teacher = None if recipe.teacher is None else parse_source(recipe.teacher, "--teacher")
    task, model, device = set_up(recipe, parse_init(recipe.init), teacher, folder, Signals())

    class Display:
        labels = staticmethod(lambda *_, **__: None)

    recipe = task.recipe
    said = {"precision": recipe.precision, "phases": len(task.plan.phases), "steps": task.plan.total_steps}
    said |= {"on": [name for name in SWITCHES if getattr(recipe, name) is True]}
    with gpu:
        model.learner.to(GPU)
        if recipe.head_init == "probe":
            start_head(task, device, model.learner, fit=recipe.init != "none")
        elif recipe.init != "none":
            scores_to_beat(task, model, device)
        said["probe"] = dict(gpu.found)
        loop = make_loop(task, model, device, RunFolder(folder), Display())
        device.prepare(next(feed(task, device, "labelled", 0)).images, task.preprocess)  # mean and std are copied once
        gpu.found.clear()
        gpu.kernels.clear()
        loop.train(task.plan.phases, 0, Silent())
        said["training"] = dict(gpu.found)
        said["together"] = sum(count for name, count in gpu.kernels.items() if "_foreach" in name or "_fused" in name)
        for images in (8, 24):
            gpu.found.clear()
            device.outputs(loop.roles.learner, task.views("val"), torch.arange(images).numpy())
            said[f"evaluation of {images}"] = dict(gpu.found)
        phase = next((p for p in task.plan.phases if p.name == "imitation"), None)
        if phase is not None and not phase.given and recipe.method != "auto":
            gpu.found.clear()
            pool_labeller(task, device, loop.roles, folder, Display.labels)(phase)
            said["labelling"] = dict(gpu.found)
        gpu.found.clear()
        model.exported(loop.learner())
        said["export"] = dict(gpu.found)
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    os._exit(0)  # torch may crash when fake tensors are taken down


if __name__ == "__main__":
    play(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
