"""What we lean on that libraries do not promise: a test for each that fails when it changes, and no use is unlisted.

docs/private_apis.md lists what is meant; a comment `# private: NAME` marks each place that uses it.
"""

from __future__ import annotations

import ast
import copy
import datetime
import errno
import importlib
import inspect
import io
import json
import multiprocessing
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import datasets
import huggingface_hub
import jinja2.sandbox
import pytest
import torch
import transformers
from pydantic import Field
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tokenizers import Tokenizer, decoders
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.utils.chat_template_utils import render_jinja_template

from tests.data.tiny_tokenizers import CHATML, byte_bpe, sentence_piece, word_level
from tests.distributed.worlds import ended
from tests.payload import Payload
from tests.private_uses import PAGE, listed, marks, sources, unmarked
from tests.tiny import HYBRIDS, SHORT_CONVS, tiny_model
from tuningfork.data.tokens.template_date import with_fixed_date
from tuningfork.distributed.ranks import Ranks, of_a_collective
from tuningfork.errors import is_of_memory, is_panic
from tuningfork.models import compiler
from tuningfork.models.hf import attention, gated_delta, short_conv
from tuningfork.models.hf.comparable import comparable
from tuningfork.models.hf.load import bears_8_bits
from tuningfork.models.hf.trust import take_no_kernels
from tuningfork.recipe.validate import allowed
from tuningfork.report.sinks.tensorboard import open_sink
from tuningfork.train import checkpoint, checkpoint_writer
from tuningfork.train.checkpoint_reader import _FILLED, _KNOWN, _STEPS, METADATA
from tuningfork.wording import of_pickle

_TESTS: dict[str, str] = {}
"""What is leaned on -> the test that holds it."""


def lean(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks the test of something that is leaned on: where it fails, it says which of our files do so."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        _TESTS[name] = test.__name__

        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                places = ", ".join(f"{file}:{line}" for file, line in marks()[name])
                pytest.fail(
                    f"{name} is no longer what {places} leans on; see {PAGE.name}. {type(error).__name__}: {error}"
                )

        return run

    return decorate


# --- PyTorch's compiler ----------------------------------------------------------------------------------------------


@lean("torch._dynamo.config.recompile_limit")
def test_the_limit_of_recompiles_can_be_raised():
    for limit in (1, 3):
        torch._dynamo.reset()
        counter = CompileCounter()
        with torch._dynamo.config.patch(recompile_limit=limit):
            run = torch.compile(lambda x: x + 1, backend=counter, dynamic=False)
            for rows in (2, 3, 4, 5, 6):
                run(torch.zeros(rows))
        assert counter.frame_count == limit


@lean("torch.fx.experimental._config.use_duck_shape")
def test_sizes_that_happen_to_be_equal_stay_two():
    graphs = {}
    for duck_shape in (True, False):
        torch._dynamo.reset()
        counter = CompileCounter()
        with torch.fx.experimental._config.patch(use_duck_shape=duck_shape):
            run = torch.compile(lambda x, y: (x + 1, y + 1), backend=counter, dynamic=True)
            for rows in (32, 64, 96):
                run(torch.zeros(rows), torch.zeros(32))
        graphs[duck_shape] = counter.frame_count
    assert graphs == {True: 2, False: 1}


@lean("torch._dynamo.config.specialize_int")
def test_numbers_of_a_layer_are_constants_of_its_graph():
    class Layer(torch.nn.Module):
        _is_fsdp_managed_module = _fsdp_use_orig_params = True  # as FSDP2 marks those whose weights it gathers

        def __init__(self) -> None:
            super().__init__()
            self.projection = torch.nn.Linear(8, 8)
            self.width = 4

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.projection(rows).view(-1, self.width)

    inputs = {}
    for specialize in (True, False):
        torch._dynamo.reset()

        def note(graph: torch.fx.GraphModule, _: object, specialize: bool = specialize):
            inputs[specialize] = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
            return graph.forward

        layer = Layer()
        with torch._dynamo.config.patch(specialize_int=specialize):
            torch.compile(layer.forward, backend=note, dynamic=True)(torch.zeros(12, 8))
    assert "l_self_width" in inputs[False] and "l_self_width" not in inputs[True]


@lean("torch._dynamo.utils.get_compilation_metrics")
def test_the_compiler_keeps_what_it_has_made_and_why():
    from torch._dynamo.utils import get_compilation_metrics

    torch._dynamo.reset()
    run = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    for rows, cause in ((2, None), (3, "size mismatch at index 0. expected 2, actual 3")):
        run(torch.zeros(rows))
        last = get_compilation_metrics()[-1]
        assert (last.is_forward, last.is_runtime, last.co_name) == (True, False, "<lambda>")
        assert last.co_filename == __file__ and last.co_firstlineno > 0 and last.compile_id
        assert last.recompile_reason is None if cause is None else cause in last.recompile_reason


@lean("triton.knobs.runtime.jit_post_compile_hook")
def test_triton_has_a_hook_for_kernels_that_it_compiles():
    triton = pytest.importorskip("triton")
    from triton.runtime import jit

    assert hasattr(triton.knobs.runtime, "jit_post_compile_hook")
    calls = inspect.getsource(jit.JITFunction)
    for told in ("jit_post_compile_hook", "'signature'", "'constants'", "'configs'", "'num_warps'", "JitFunctionInfo("):
        assert told in calls, told


@lean("triton.Autotuner.prune_configs")
def test_a_tuner_asks_once_for_each_key_which_configurations_to_time():
    pytest.importorskip("triton")
    from triton.runtime.autotuner import Autotuner

    run = inspect.getsource(Autotuner.run)
    assert run.index("if key not in self.cache") < run.index("self.prune_configs(kwargs)") < run.index("_bench(")
    assert "self.nargs = " in run and "self.keys" in run


@lean("torch._inductor.config")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what it imports itself
def test_the_compiler_knows_the_options_that_it_is_given():
    for device in ("cpu", "cuda"):
        options = compiler.options(torch.device(device))
        assert options["deterministic"] is True  # else the order of a reduction is not the same in all graphs
        torch.compile(lambda x: x, options=options)
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(lambda x: x, options={"no_such_option": True})


@lean("torch._inductor.custom_graph_pass")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what it imports itself
def test_the_compiler_runs_our_pass_over_its_graphs():
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    seen = []

    class Onlooker(compiler.Float32WeightGradients):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(graph)

    graph = make_fx(lambda x: x.mm(x))(torch.zeros(2, 2))
    with torch._inductor.config.patch(post_grad_custom_pre_pass=Onlooker()):
        post_grad_passes(graph, False)
    assert seen == [graph.graph]
    assert compiler.Float32WeightGradients().uuid() == compiler.Float32WeightGradients().uuid() is not None


@lean("torch.ops.prims.convert_element_type")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_autocast_casts_a_weights_gradient_as_the_pass_looks_for():
    """The pass passes over a graph of another form without a word, and the gradient is then rounded to bfloat16."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    found = []

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        looks = compiler.Float32WeightGradients(wide=False)._gradient
        found.append(sum(looks(node) is not None for node in graph.graph.nodes))
        return forward(graph, inputs)

    def parted(graph: torch.fx.GraphModule, inputs: Any, **more: Any) -> Any:
        joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, **more)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        decompositions=select_decomp_table(),
        partition_fn=parted,
    )
    layers = nn.Sequential(nn.Linear(8, 16, bias=False), nn.SiLU(), nn.Linear(16, 8, bias=False))
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(layers, backend=backend)(torch.randn(4, 8)).float().sum().backward()
    assert found == [2]


@lean("torch._functorch.config")
def test_the_budget_of_activations_is_a_setting_that_can_be_set_for_a_while():
    config: Any = torch._functorch.config
    for name, usual, ours in (("activation_memory_budget", 1.0, 0.5), ("is_non_builtin_to_include", False, True)):
        assert getattr(config, name) == usual
        with config.patch({name: ours}):
            assert getattr(config, name) == ours
        assert getattr(config, name) == usual


@lean("torch._inductor.compile_fx")
def test_a_backend_of_ours_can_hand_on_to_the_compilers_own():
    from torch._inductor.compile_fx import compile_fx

    parameters = list(inspect.signature(compile_fx).parameters.values())
    assert all(one.default is not one.empty or place < 2 for place, one in enumerate(parameters))
    assert "config_patches" in {one.name for one in parameters}


@lean("torch._inductor.cpp_builder")
@lean("torch._inductor.exc")
def test_the_compiler_says_by_its_own_error_that_there_is_no_compiler_for_c():
    from torch._inductor import config as settings
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    forget = getattr(cpp_builder.get_cpp_compiler, "cache_clear", lambda: None)
    forget()
    # Not by monkeypatch: it would delete the setting when it is done, and others compile in this process.
    with settings.patch({"cpp.cxx": ("/no/such/compiler",)}), pytest.raises(InvalidCxxCompiler):
        cpp_builder.get_cpp_compiler()
    forget()


# --- PyTorch beside it -----------------------------------------------------------------------------------------------


@lean("torch._foreach_norm")
def test_norms_of_many_tensors_are_taken_in_the_dtype_that_is_asked_for():
    gradients = [torch.full((4096,), 1.0, dtype=torch.bfloat16), torch.full((3,), 2.0)]
    norms = torch._foreach_norm(gradients, 2.0, torch.float32)
    assert [norm.item() for norm in norms] == [64.0, pytest.approx(12**0.5, rel=2**-22)]
    assert all(norm.dtype == torch.float32 for norm in norms)


@lean("torch._foreach_mul_")
def test_many_tensors_are_multiplied_in_place_by_one_scalar():
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    places = [tensor.data_ptr() for tensor in tensors]
    torch._foreach_mul_(tensors, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [1.0, 1.0, 1.0]]
    assert [tensor.data_ptr() for tensor in tensors] == places


@lean("torch.optim.AdamW.grad_scale")
def test_a_fused_optimizer_divides_gradients_by_its_scale():
    moved = []
    for scale in (None, torch.tensor(4.0)):
        weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        # An eps that is large beside the gradients, for without one Adam's step does not depend on their scale.
        optimizer: Any = torch.optim.AdamW([weight], lr=0.1, eps=1.0, fused=True)
        weight.grad = torch.tensor([0.5, -0.25, 2.0]) * (1.0 if scale is None else 4.0)
        if scale is not None:
            optimizer.grad_scale = scale
        optimizer.step()
        moved.append(weight.detach())
    assert torch.equal(*moved)


@lean("torch._C._set_deterministic_algorithms")
def test_deterministic_algorithms_can_be_asked_for_without_the_compiler() -> None:
    option = torch._inductor.config.deterministic
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch._inductor.config.deterministic == option
    finally:
        torch._C._set_deterministic_algorithms(False, warn_only=False)
    assert not torch.are_deterministic_algorithms_enabled()


@lean("torch.nn.Module._forward_pre_hooks")
def test_a_modules_hooks_can_be_looked_through():
    def hook(*_: Any) -> None: ...

    module = nn.Identity()
    module.register_forward_pre_hook(hook, with_kwargs=True)
    assert list(module._forward_pre_hooks.values()) == [hook]


@lean("torch.nn.Module._forward_hooks")
def test_a_modules_hooks_behind_it_can_be_looked_through_and_go_with_a_copy():
    module = nn.Identity()
    module.register_forward_hook(list)
    assert list(module._forward_hooks.values()) == list(copy.deepcopy(module)._forward_hooks.values()) == [list]


@lean("torch.nn.modules.dropout._DropoutNd")
def test_all_layers_of_dropout_are_of_one_kind_with_a_rate():
    kinds = [kind for name, kind in vars(nn).items() if "Dropout" in name and isinstance(kind, type)]
    assert {nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout} <= set(kinds)
    assert all(issubclass(kind, nn.modules.dropout._DropoutNd) and kind(0.25).p == 0.25 for kind in kinds)


@lean("torch.utils._python_dispatch")
def test_products_of_layers_can_be_watched():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Onlooker(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func.overloadpacket, [tuple(t.shape) for t in args if isinstance(t, torch.Tensor)][-2:]))
            return func(*args, **(kwargs or {}))

    with Onlooker():
        nn.Linear(3, 5, bias=False)(torch.zeros(1, 2, 3))
        nn.Linear(3, 5)(torch.zeros(2, 3))
    aten = torch.ops.aten
    products = [call for call in seen if call[0] in (aten.mm, aten.addmm)]
    assert products == [(aten.mm, [(2, 3), (3, 5)]), (aten.addmm, [(2, 3), (3, 5)])]


@lean("torch.utils._pytree")
def test_the_module_that_warns_of_another_librarys_future_is_there():
    assert importlib.import_module("torch.utils._pytree").__name__ == "torch.utils._pytree"


@lean("torch.utils.flop_counter")
def test_an_operator_of_ours_counts_its_own_flops():
    from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

    @torch.library.custom_op("tuningfork_test::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @register_flop_formula(torch.ops.tuningfork_test.counted)
    def _(shape: Any, *args: Any, **kwargs: Any) -> int:
        return 7 * shape[0]

    with FlopCounterMode(display=False) as counter:
        counted(torch.zeros(3))
    assert counter.get_total_flops() == 21


@lean("torch by its words for too little memory")
def test_a_refused_allocation_is_told_by_its_words():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_of_memory(caught.value)


def _left_alone(ranks: Ranks) -> bool:
    if ranks.rank == 1:
        os._exit(9)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(2):
            torch.distributed.all_reduce(torch.ones(1))
    return of_a_collective(caught.value)


@lean("torch by its words for a failed collective")
def test_a_rank_that_has_died_is_told_by_the_words_of_gloo() -> None:
    assert ended(2, _left_alone)[0] == (True, True)


@lean("torch.load by its words")
def test_what_a_pickle_calls_for_is_told_by_the_librarys_words(tmp_path):
    torch.save(Payload(tmp_path / "made"), tmp_path / "weights.bin")
    with pytest.raises(pickle.UnpicklingError) as caught:
        torch.load(tmp_path / "weights.bin", weights_only=True)
    assert "it calls for 'posix.mkdir'" in of_pickle(caught.value)
    assert not (tmp_path / "made").exists()


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = nn.Linear(4, 4)
    progress = checkpoint.Progress(1, 2, "data", "model", "float32", "none", "held out", None)
    return checkpoint.save(folder, progress, model, torch.optim.AdamW(model.parameters()), keep_last=1)


def called_for(content: bytes) -> set[tuple[str, str]]:
    """(module, name) of all that a pickle calls for."""
    found = set()

    class Onlooker(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add((module, name))
            return super().find_class(module, name)

    Onlooker(io.BytesIO(content)).load()
    return found


@lean("torch.distributed.checkpoint.filesystem")
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_all_files_of_a_checkpoint_go_through_our_file_system(saved):
    hashed = checkpoint_writer.HashedFiles()
    writer = torch.distributed.checkpoint.FileSystemWriter(saved.parent / "again")
    writer.fs = hashed
    torch.distributed.checkpoint.save({"a": torch.zeros(2)}, storage_writer=writer, no_dist=True)
    assert hashed.checksums.keys() == {path.name for path in (saved.parent / "again").iterdir()} >= {METADATA}


@lean("torch.distributed.checkpoint.api")
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_full_disk_is_named_by_the_error_of_a_checkpoint(tmp_path):
    class Full(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
            yield

    writer = torch.distributed.checkpoint.FileSystemWriter(tmp_path / "full")
    writer.fs = Full()
    with pytest.raises(CheckpointException) as caught:
        torch.distributed.checkpoint.save({"a": torch.zeros(2)}, storage_writer=writer, no_dist=True)
    assert [failure.errno for failure, _ in caught.value.failures.values()] == [errno.ENOSPC]


@lean("torch.distributed.checkpoint.filesystem._StorageInfo")
@lean("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING")
@lean("torch.serialization._get_layout")
def test_a_checkpoint_calls_for_what_its_reader_knows(saved):
    wanted = called_for((saved / METADATA).read_bytes())
    assert wanted <= _KNOWN.keys()
    assert {name for _, name in wanted} >= {"_StorageInfo", "_MEM_FORMAT_ENCODING", "_get_layout"}
    place = next(iter(torch.distributed.checkpoint.FileSystemReader(saved).read_metadata().storage_data.values()))
    assert type(place) in _FILLED and {one.name for one in fields(place)} >= {
        "relative_path",
        "offset",
        "length",
        "transform_descriptors",
    }


@lean("pickle._Unpickler")
def test_the_unpickler_in_python_takes_the_steps_that_we_hold(saved):
    assert {step[0] for step in _STEPS} <= pickle._Unpickler.dispatch.keys()
    made = []

    class Onlooker(pickle._Unpickler):
        def load_build(self) -> None:
            made.append(("build", type(self.stack[-2]).__name__))
            super().load_build()

        def load_newobj(self) -> None:
            made.append(("newobj", self.stack[-2].__name__))
            super().load_newobj()

        # As in our reader: the table of steps has plain functions.
        dispatch = {  # noqa: RUF012
            **pickle._Unpickler.dispatch,
            pickle.BUILD[0]: load_build,
            pickle.NEWOBJ[0]: load_newobj,
        }

    Onlooker(io.BytesIO((saved / METADATA).read_bytes())).load()
    assert ("newobj", "Metadata") in made and ("build", "Metadata") in made


@lean("pathlib._local")
def test_a_path_is_pickled_by_a_name_that_the_reader_knows():
    assert called_for(pickle.dumps(Path("/a/b"))) <= _KNOWN.keys()


# --- transformers: models --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama", torch.float32).save_pretrained(folder)
    return folder


@lean("transformers.ALL_ATTENTION_FUNCTIONS")
def test_attention_is_looked_up_by_name_and_gets_the_calls_keywords():
    seen = []

    class Onlooker:
        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
            seen.append(tuple(q.shape))
            return torch.zeros_like(q)

    model = tiny_model("llama", torch.float32)
    assert "ALL_ATTENTION_FUNCTIONS" in vars(inspect.getmodule(type(model)))  # how support.py knows such a model
    ids = torch.zeros(1, 3, dtype=torch.long)
    model.model(input_ids=ids, position_ids=torch.arange(3)[None], use_cache=False, fork=Onlooker())
    assert seen == [(3, 4, 8)] * 4


@lean("transformers.DecoderLayer")
@pytest.mark.parametrize(
    ("name", "config"), [("NemotronDecoderLayer", "NemotronConfig"), ("StableLmDecoderLayer", "StableLmConfig")]
)
def test_blocks_that_keep_keywords_to_themselves_hand_on_their_mask(name, config):
    assert name in attention._ONLY_HAND_ON_MASKS and len(attention._ONLY_HAND_ON_MASKS) == 2
    seen = []

    class Onlooker:
        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
            seen.append(self)
            return torch.zeros_like(q)

    sizes = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.AutoModel.from_config(
        getattr(transformers, config)(**sizes, **heads), attn_implementation=attention.NAME
    )
    assert name in {type(module).__name__ for module in model.modules()}
    attention.patch(model)
    fork = Onlooker()
    model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False, fork=fork)
    assert seen == [fork]


@lean("transformers._attn_implementation")
@lean("transformers._experts_implementation")
def test_a_config_asks_for_attention_and_experts_by_these_names():
    config = transformers.LlamaConfig(vocab_size=9, hidden_size=32, intermediate_size=8, num_hidden_layers=1)
    config._attn_implementation, config._experts_implementation = "someone/attention", "someone/experts"
    take_no_kernels(config)
    assert config._attn_implementation == attention.NAME and config._experts_implementation is None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.config._attn_implementation == attention.NAME


@lean("transformers.get_expanded_tied_weights_keys")
def test_a_model_says_which_of_its_weights_are_tied():
    tied, apart = (tiny_model(family, torch.float32) for family in ("granite", "llama"))
    assert tied.get_expanded_tied_weights_keys(all_submodels=True) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied.get_parameter_or_buffer("lm_head.weight") is tied.get_parameter_or_buffer("model.embed_tokens.weight")
    assert apart.get_expanded_tied_weights_keys(all_submodels=True) == {}


@lean("transformers._init_weights")
def test_a_family_initialises_module_by_module() -> None:
    """Each module's own weights, and no others."""
    model = tiny_model("llama", torch.float32)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model._init_weights(model.model.layers[0].mlp.up_proj)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {"model.layers.0.mlp.up_proj.weight"}


@lean("transformers.sub_configs")
def test_a_config_says_which_of_its_settings_are_configs():
    assert transformers.LlamaConfig.sub_configs == {}
    assert issubclass(transformers.DbrxConfig.sub_configs["attn_config"], transformers.PreTrainedConfig)


@lean("transformers.attribute_map")
def test_a_config_says_what_its_family_calls_a_setting():
    config = transformers.GPT2Config(n_layer=3)
    assert config.attribute_map["num_hidden_layers"] == "n_layer"
    assert (
        config.num_hidden_layers == 3 and "n_layer" in config.to_dict() and "num_hidden_layers" not in config.to_dict()
    )


@lean("transformers._name_or_path")
def test_a_config_says_where_it_lay_by_this_name():
    config = transformers.LlamaConfig(vocab_size=9)
    config.name_or_path = "./somewhere"
    assert config.to_dict()["_name_or_path"] == "./somewhere"
    assert "./somewhere" not in json.dumps(comparable(config))


@lean("transformers._from_model_config")
def test_what_config_json_says_of_generating_can_be_read(tmp_path):
    transformers.LlamaConfig(vocab_size=9, eos_token_id=7).save_pretrained(tmp_path)
    read = transformers.GenerationConfig.from_pretrained(
        tmp_path, config_file_name="config.json", local_files_only=True, _from_model_config=True
    )
    assert read.eos_token_id == 7 and not hasattr(read, "hidden_size")


@lean("transformers._keys_to_ignore_on_load_unexpected")
def test_a_class_says_which_stored_tensors_it_passes_over():
    assert transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected is None
    said = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9))
    assert any(re.search(pattern, "h.0.attn.bias") for pattern in said._keys_to_ignore_on_load_unexpected)


@lean("transformers._weight_conversions")
@lean("transformers.core_model_loading")
def test_a_loaded_model_says_what_became_of_stored_tensors(llama, tmp_path):
    """Where it did not, every folder would be read the slow way."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama)
    assert all(isinstance(one, WeightRenaming) for one in plain._weight_conversions)
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    experts = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    assert any(isinstance(one, WeightConverter) for one in experts._weight_conversions)
    assert not issubclass(WeightConverter, WeightRenaming)


@lean("transformers.from_pretrained by state_dict")
def test_a_tensor_that_is_handed_to_the_library_becomes_a_weight_without_a_copy(llama):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    stand_ins = {name: torch.zeros(()).expand(weight.shape) for name, weight in model.state_dict().items()}
    stand_ins["left.over"] = torch.zeros(2)
    made, info = type(model).from_pretrained(
        None, config=model.config, state_dict=dict(stand_ins), dtype=torch.float32, output_loading_info=True
    )
    weights = dict(made.named_parameters(remove_duplicate=False))
    assert {name: weight.data_ptr() for name, weight in weights.items()} == {
        name: stand_ins[name].data_ptr() for name in weights
    }
    assert set(info["unexpected_keys"]) == {"left.over"}
    assert not info["missing_keys"] and not info["mismatched_keys"]


@lean("transformers.GatedDeltaNet")
@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_of_the_gated_delta_rule_have_what_our_forward_pass_takes(family):
    layers = gated_delta.layers(tiny_model(family, torch.float32))
    assert len(layers) == 3
    own = {"olmo_hybrid": 7 + 1 + 3, "qwen3_next": 3 + 1 + 3, "qwen3_5_text": 5 + 1 + 3}[family]
    for layer in layers:
        assert len(list(layer.parameters())) == own  # products, a convolution, A_log, dt_bias and a norm: all are used
        assert layer.activation == "silu" and layer.conv1d.bias is None
        sizes = layer.num_k_heads, layer.head_k_dim, layer.num_v_heads, layer.head_v_dim
        assert (*sizes, *layer.conv1d.weight.shape) == (2, 8, 4, 12, 80, 1, 4)
        if family == "qwen3_next":
            query, key, value, gate, strength, step = layer.fix_query_key_value_ordering(
                torch.arange(128.0).expand(1, 3, 128), torch.arange(8.0).expand(1, 3, 8)
            )
            assert query[0, 0, 1].tolist() == [*range(64, 72)] and key[0, 0, 1].tolist() == [*range(72, 80)]
            assert value[0, 0, 2].tolist() == [*range(80, 92)] and gate[0, 0, 2].tolist() == [*range(104, 116)]
            assert strength[0, 0].tolist() == [0, 1, 4, 5] and step[0, 0].tolist() == [2, 3, 6, 7]


@lean("transformers.Lfm2ShortConv")
@pytest.mark.parametrize("family", SHORT_CONVS)
def test_short_convolutions_have_what_our_forward_pass_takes(family):
    layers = short_conv.layers(tiny_model(family, torch.float32))
    assert len(layers) == 3
    for layer in layers:
        biased = family == "lfm2_with_biases"
        assert len(list(layer.parameters())) == 3 * (1 + biased)  # two products and a convolution: all are used
        assert layer.conv.weight.shape == (32, 1, 3 + biased) and (layer.conv.bias is not None) == biased
        assert (layer.in_proj.out_features, layer.out_proj.in_features) == (96, 32)


@lean("transformers by inspect.getsource")
def test_the_source_of_a_models_classes_can_be_read():
    model = tiny_model("llama", torch.float32)
    kinds = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
    for kind in kinds:
        assert inspect.getsource(kind).lstrip().startswith(("class ", "@"))
    assert "config.attention_dropout" in inspect.getsource(type(model.model.layers[0].self_attn))
    assert f"class {type(model).__name__}" in inspect.getsource(inspect.getmodule(type(model)))


@lean("torch.Tensor.__tensor_flatten__")
def test_moments_in_8_bits_come_apart_and_together():
    pytest.importorskip("torchao")
    from torchao.optim.subclass_8bit import OptimState8bit

    moments = OptimState8bit.zeros((64, 64))
    moments.copy_(torch.linspace(0, 1, 64 * 64).view(64, 64))
    parts, rest = moments.__tensor_flatten__()
    copies = {part: getattr(moments, part).clone() for part in parts}
    again = OptimState8bit.__tensor_unflatten__(copies, rest, moments.shape, moments.stride())
    assert torch.equal(again.dequantize(), moments.dequantize())


@lean("torchao.optim.AdamW8bit")
def test_which_moments_are_kept_in_8_bits(uncompiled):
    from torchao.optim import AdamW8bit

    for shape in ((15, 256), (16, 256), (17, 256), (64, 65), (4096,)):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.ones(shape)
        optimizer = AdamW8bit([weight])
        optimizer.step()
        moments = [optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]
        assert {hasattr(moment, "block_size") for moment in moments} == {bears_8_bits(weight.shape)}
        assert all(moment.block_size == 256 for moment in moments if hasattr(moment, "block_size"))


# --- tokenizers and templates ----------------------------------------------------------------------------------------


@lean("transformers.tokenizer_class_from_name")
def test_a_tokenizers_class_is_found_by_its_name():
    assert tokenizer_class_from_name("PreTrainedTokenizerFast") is transformers.PreTrainedTokenizerFast
    assert tokenizer_class_from_name("NoSuchTokenizer") is None
    assert (
        tokenizer_class_from_name("AutoModelForCausalLM") is transformers.AutoModelForCausalLM
    )  # hence check_tokenizer


@lean("transformers.render_jinja_template")
def test_a_template_is_printed_by_the_function_below_the_usual_one():
    tokenizer = byte_bpe(chat_template=CHATML)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    printed: Any = render_jinja_template(
        [messages],
        chat_template=tokenizer.get_chat_template(),
        add_generation_prompt=True,
        **tokenizer.special_tokens_map,
    )
    assert printed[0] == [tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)]
    known = inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters
    assert {"tools", "documents", "tokenize", "add_generation_prompt"} <= known.keys()


@lean("transformers.strftime_now")
def test_a_macro_takes_the_place_of_the_function_that_tells_the_time():
    template = "{{ strftime_now('%Y-%m-%d') }}"
    tokenizer = byte_bpe(chat_template=template)
    asked: Any = {"conversation": [{"role": "user", "content": "Hi"}], "tokenize": False}
    assert datetime.date.fromisoformat(tokenizer.apply_chat_template(**asked))
    assert with_fixed_date(tokenizer, "2001-02-03").apply_chat_template(**asked) == "2001-02-03"


def frames(error: BaseException) -> Iterator[tuple[dict[str, Any], int]]:
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame.f_globals, at.tb_lineno
        at = at.tb_next


@lean("jinja2.__jinja_exception__")
@lean("jinja2.__jinja_template__")
def test_a_templates_line_is_told_by_its_frames():
    def fail(error: type[BaseException]) -> None:
        raise error

    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string("one\ntwo\n{{ fail(error) }}\n")
    with pytest.raises(ZeroDivisionError) as caught:
        template.render(fail=fail, error=ZeroDivisionError)
    assert [line for known, line in frames(caught.value) if "__jinja_exception__" in known] == [3]
    with pytest.raises(KeyboardInterrupt) as ended:  # of which Jinja makes no traceback of its own
        template.render(fail=fail, error=KeyboardInterrupt)
    [(made, line)] = [
        (known["__jinja_template__"], n) for known, n in frames(ended.value) if "__jinja_template__" in known
    ]
    assert isinstance(made, jinja2.Template) and made.get_corresponding_lineno(line) == 3


@lean("tokenizers.Tokenizer.to_str")
def test_a_tokenizers_parts_have_these_names():
    for tokenizer in (byte_bpe(), sentence_piece(letters="ab"), word_level(["a", "b"])):
        facts = json.loads(tokenizer.backend_tokenizer.to_str())
        assert facts.keys() >= {"post_processor", "truncation", "padding", "added_tokens", "model"}
        assert isinstance(facts["model"]["vocab"], dict)
        assert all(isinstance(token["content"], str) for token in facts["added_tokens"])
        assert Tokenizer.from_str(json.dumps(facts)).get_vocab() == tokenizer.get_vocab()


@lean("tokenizers.PanicException")
def test_a_library_in_rust_that_panics_is_told_by_the_name_of_its_error():
    with pytest.raises(BaseException) as caught:
        decoders.Strip("a", 5, 5).decode(["a"])
    assert is_panic(caught.value) and not isinstance(caught.value, Exception)


# --- the other libraries ---------------------------------------------------------------------------------------------


@lean("datasets.Json")
def test_a_column_of_json_has_a_kind_of_its_own():
    if not hasattr(datasets, "Json"):
        assert int(datasets.__version__.split(".")[0]) < 5, "the kind of JSON columns has another name"
        pytest.skip(f"datasets {datasets.__version__} knows no columns of JSON")
    features = datasets.Features({"a": datasets.Json()})
    made = datasets.Dataset.from_dict({"a": [{"b": [1, None]}]}, features=features)
    kind = datasets.Features.from_arrow_schema(made.data.schema)["a"]
    assert isinstance(kind, datasets.Json)
    assert datasets.Features({"a": kind}).decode_example({"a": made.data.column("a")[0].as_py()}) == {
        "a": {"b": [1, None]}
    }


@lean("datasets._data_files")
def test_a_saved_data_set_says_what_its_files_are(tmp_path):
    datasets.Dataset.from_dict({"a": [1, 2]}).save_to_disk(str(tmp_path))
    named = [part["filename"] for part in json.loads((tmp_path / "state.json").read_text())["_data_files"]]
    assert named and all((tmp_path / name).is_file() for name in named)


@lean("huggingface_hub.snapshot_download by tqdm_class")
def test_bytes_of_the_hub_are_reported_by_a_bar_of_their_own():
    assert "tqdm_class" in inspect.signature(huggingface_hub.snapshot_download).parameters
    module: Any = inspect.getmodule(inspect.unwrap(huggingface_hub.snapshot_download))
    bars = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
    ]
    of_bytes = [bar for bar in bars if bar.get("unit") == "'B'"]
    counted = [bar for bar in of_bytes if not bar["desc"].strip("'").startswith("Downloading")]
    assert len(counted) == 1, "which of the bars counts what has arrived?"


class _This:
    """Pickled, the process that reads it."""

    def __reduce__(self) -> Any:
        return multiprocessing.current_process, ()


class _Starting:
    """Pickled, whether the process that reads it is still starting."""

    def __reduce__(self) -> Any:
        return getattr, (_This(), "_inheriting", False)


@lean("multiprocessing.process._inheriting")
def test_a_process_that_is_starting_can_be_told():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=theirs.send, args=(_Starting(),))
    process.start()
    assert ours.poll(60) and ours.recv() is True
    process.join()
    assert not getattr(multiprocessing.current_process(), "_inheriting", False)


@lean("pydantic.fields.FieldInfo")
def test_the_limits_of_a_setting_can_be_read():
    assert allowed(Annotated[int, Field(ge=1, le=3)]) == "a whole number, at least 1 and at most 3"
    assert allowed(Annotated[float, Field(gt=0, lt=1)]) == "a number, greater than 0 and less than 1"
    assert allowed(Annotated[str, Field(description="a name")]) == "a name"


@lean("re._parser")
def test_the_length_of_what_an_expression_matches_can_be_read():
    assert re._parser.parse("ab?c{2,}").getwidth()[0] == 3  # type: ignore[attr-defined]


@lean("tensorboard.compat.proto")
@lean("tensorboard.summary.writer.record_writer")
def test_what_we_write_is_what_tensorboard_reads(tmp_path):
    board = open_sink(tmp_path / "board", first_step=3)
    board.write(3, {"loss": 0.5})
    board.close()
    [file] = (tmp_path / "board").iterdir()
    version, start, scalar = LegacyEventFileLoader(os.fspath(file)).Load()
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (3, start.session_log.START)
    assert scalar.step == 3 and [(one.tag, one.simple_value) for one in scalar.summary.value] == [("loss", 0.5)]


# --- the page and the marks ------------------------------------------------------------------------------------------


def test_the_reader_of_uses_sees_each_kind_and_no_other():
    """Guards the guard."""
    source = """
import torch._dynamo
from torch.nn.modules.dropout import _DropoutNd
import numpy as np
import os, inspect, torch, rich
from tuningfork.kernels import _ours
_mine = object()
class Thing:
    def __init__(self, _own=None):
        self._kept = _own
    def use(self, other):
        other._kept, self._kept, other._replace(a=1), os._exit(0), Thing(_own=2)
        other._theirs
        getattr(other, "_by_name")
        np._core
        inspect.getsource(other)
        torch.backends.flag = True
        other.load(_hidden=1)
        "_of" + other, other.endswith("_more"), f"a{other}_tail", getattr(other, "_mine"), "__main__", other.__class__
        {"__jinja_template__": other}
def late(x):
    return x._late
"""
    assert sorted(line.split(": ")[1] for line in unmarked({"a.py": source})) == sorted(
        [
            "_dynamo",
            "_DropoutNd",
            "_theirs",
            "_by_name",
            "_core",
            "getsource",
            "flag",
            "_hidden",
            "__jinja_template__",
            "_late",
        ]
    )
    marked = source.replace("import torch._dynamo", "import torch._dynamo  # private: torch._dynamo")
    marked = marked.replace("    return x._late", "    # private: else._other, x._late\n    return x._late")
    assert {"_dynamo", "_late"}.isdisjoint(line.split(": ")[1] for line in unmarked({"a.py": marked}))


def test_every_use_is_marked():
    """Else: mark it (`# private: NAME`), list it in docs/private_apis.md, and write a test that it is still there."""
    assert unmarked(sources()) == []


def test_the_page_the_marks_and_the_tests_name_the_same():
    assert marks().keys() == listed().keys()
    assert {name: tests[0] for name, tests in listed().items()} == _TESTS


def test_every_test_that_the_page_names_is_there():
    everywhere = {
        node.name
        for path in Path(__file__).parent.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert {test for tests in listed().values() for test in tests} <= everywhere
