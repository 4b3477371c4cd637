"""Products of MXFP8 and NVFP4, compiled for Blackwell on a machine without one: which instruction multiplies, and how
scales get to it. What Hopper makes of the same formats is in test_compiled.py."""

import re

MMA = {
    "float8_e4m3fn FORM 2": "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32",
    "uint8 FORM 3": "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16",
}
"""By the form of a launch: MXFP8 with a scale per 32, NVFP4 with one per 16."""


def test_scales_are_copied_as_they_lie(one_compiler):
    """From shared to tensor memory by `tcgen05.cp`, as many as a step of the loop has tiles; only the sum's zeros are
    stored from registers. Loads are asynchronous. Every tile of the plain product; of the others, which have the same
    loop, the first."""
    chosen = {}
    for number, job in enumerate(one_compiler.jobs):
        if job["kernel"].startswith("block_scaled.") and job["offered"]:
            plain = job["kernel"] == "block_scaled.scaled_matmul_kernel"
            chosen.setdefault((job["kernel"], job["form"], job["tile"] if plain else ""), number)
    found = [(name, form, one_compiler.ask(number, "ptx")["text"]) for (name, form, _), number in chosen.items()]
    assert len({(name, form) for name, form, _ in found}) == 5
    for name, form, ptx in found:
        assert {one for one in re.findall(r"tcgen05\.mma\.[\w.:]+|wgmma\.mma[\w.]+", ptx)} == {MMA[form]}, name
        copies, stores = (re.findall(rf"tcgen05\.{what}\.[\w.:]+", ptx) for what in ("cp", "st"))
        assert len(set(copies)) == 1 and len(copies) >= 2, (name, form)
        assert len(stores) == 1 and "cp.async.c" in ptx, (name, form)
