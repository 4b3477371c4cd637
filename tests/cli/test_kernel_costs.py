"""`etude plan --kernels`: floors of kernels, and what the model says of the kernels post's ratios."""

import json

import pytest

from etude.plan import kernels as kernel_costs


def test_the_posts_ratios():
    """Those that follow from data sheets, by hand; and verdicts by the rule."""
    found = {ratio.name: ratio for ratio in kernel_costs.ratios()}
    dequantise = found["expanding codes on ordinary cores over the product, B200"]
    assert dequantise.model == 4500 / 80 / 32 == 1.7578125 and dequantise.explained == "yes"
    assert (
        found["the same, H100"].model == pytest.approx(1979 / 67 / 32) and found["the same, H100"].explained == "nearly"
    )
    # 3.03125 bytes at 8 TB/s over 2 · 2048 FLOPs at 4500 TFLOP/s, per number.
    forward = found["quantisation over the product, forward"]
    assert (
        forward.model == pytest.approx(3.03125 / 8e12 / (4096 / 4.5e15)) == pytest.approx(0.4163, abs=1e-4)
        and forward.explained == "yes"
    )
    assert found["quantisation, backward over forward"].explained == "yes"
    # (1 + 2) / (3 − (0.53 + 2 · 0.27) · (1 − 1 / 3.5))
    assert (
        found["a step, from the layer's 3.5"].model == pytest.approx(3 / (3 - 1.07 * 2.5 / 3.5))
        and 1.34 < 3 / (3 - 1.07 * 2.5 / 3.5) < 1.35
    )
    layer = found["the layer in MXFP8 over bfloat16, B200"]
    assert 1 < layer.model < 2 and layer.explained == "no", "formats alone give less than their peaks' ratio"


@pytest.mark.parametrize(
    ("model", "verdict"),
    [(1.0, "yes"), (1.09, "yes"), (0.91, "yes"), (1.11, "nearly"), (0.76, "nearly"), (1.26, "no"), (0.5, "no")],
)
def test_verdicts(model, verdict):
    assert kernel_costs.Ratio("r", 1.0, model, "").explained == verdict


def test_plan_of_kernels(tmp_path, ask):
    code, said, error = ask("plan", "--kernels", "--out", tmp_path / "plan")
    told = " ".join(said.split())  # tables are as wide as the terminal
    assert (
        (code, error) == (0, "")
        and "8192³" in told
        and "quantisation, backward" in told
        and "what an H100 measured" in told
    )
    found = json.loads((tmp_path / "plan" / "kernels-plan.json").read_text())
    product = next(one for one in found["costs"] if (one["work"], one["format"]) == ("8192³", "bfloat16"))
    assert (
        product["flops"] == 2 * 8192**3 and product["launches"] == 1 and round(product["microseconds"]["h200"]) == 1111
    )
    layers = {(one["work"], one["format"]): one for one in found["costs"]}
    assert layers["experts forward", "bfloat16"]["flops"] == 3 * 2 * 32_768 * 8 * 2048 * 768
    for form in ("fp8", "mxfp8", "nvfp4-token"):
        assert (
            layers["experts forward", form]["microseconds"]["b200"]
            < layers["experts forward, apart", form]["microseconds"]["b200"]
        )
    assert {one["explained"] for one in found["ratios"]} == {"yes", "nearly", "no"}


def test_other_options_are_refused(ask):
    code, _, error = ask("plan", "--kernels", "--gpus", 8)
    assert (
        code == 2
        and error
        == "error: --gpus does not apply to --kernels, whose shapes and GPUs are fixed; leave one of the two out\n"
    )


def test_a_gpu_that_multiplies_no_nvfp4_gains_nothing_by_it():
    found = {(one.work, one.format): one for one in kernel_costs.costs()}
    for gpu in ("h100", "h200"):
        assert found["8192³", "nvfp4-token"].microseconds[gpu] > found["8192³", "bfloat16"].microseconds[gpu]
    assert found["8192³", "nvfp4-token"].microseconds["b300"] < found["8192³", "nvfp4-token"].microseconds["b200"]
