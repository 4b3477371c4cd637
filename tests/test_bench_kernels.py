"""The benchmark's gates, at small sizes under the interpreter: every kernel passes, a wrong one has no number."""

import pytest
import torch

from etude.bench import kernel_cases
from etude.bench import kernels as bench_kernels
from kit.settings import RunError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_every_gate_opens():
    names = []
    for case in kernel_cases.cases(DEVICE, tiny=True):
        assert case.gate() is None, case.name
        assert case.kernels and case.baselines
        for call in (case.kernels | case.baselines).values():
            call()
        names.append(case.name)
    assert len(names) > 20


@pytest.mark.parametrize(
    "made",
    [kernel_cases.quantisers, kernel_cases.products, kernel_cases.expert_products, kernel_cases.heads],
    ids=lambda f: f.__name__,
)
def test_a_gate_shuts_on_a_wrong_result(made, monkeypatch):
    """The same cases with kernels that are off by a little."""

    def off(call):
        def wrong(*args, **kwargs):
            result = call(*args, **kwargs)
            if isinstance(result, tuple):
                return tuple(t * 1.02 if t.is_floating_point() else t ^ 1 for t in result)
            return result * 1.02

        wrong.__name__ = getattr(call, "__name__", "kernel")
        return wrong

    for module, names in (
        (kernel_cases.quant, ("mxfp8_quantize", "mxfp8_quantize_both", "nvfp4_quantize", "blockwise_fp8_quantize")),
        (kernel_cases.gemm, ("linear",)),
        (kernel_cases.grouped_gemm, ("expert_rows", "expert_weights")),
        (kernel_cases.linear_logprob, ("linear_logprob",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, off(getattr(module, name)))
    for case in made(DEVICE, True):
        assert case.gate() is not None, case.name


def test_a_closed_gate_has_no_number():
    line = {"case": "a kernel", "size": "4 × 4", "wrong": "it differs"}
    assert bench_kernels.sentence(line) == "a kernel, 4 × 4: no speed reported, it differs"


def test_summary_is_of_ratios_within_a_round():
    case = kernel_cases.Case("a", "1", lambda: None, {"kernel": None}, {"copy": None}, bytes=2 * 10**12)
    found = bench_kernels.summary(case, {"kernel": [1.0, 2.0, 4.0], "copy": [2.0, 2.0, 2.0]})
    assert found["ratio_and_middle_half"] == {"kernel / copy": [1.0, 0.5, 2.0]} and found["TB/s"]["kernel"] == 1.0


def test_without_a_gpu_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match="needs a CUDA GPU"):
        bench_kernels.kernels(tmp_path)
    assert not list(tmp_path.iterdir())
