"""Configurations that are not offered to the autotuner: they do not compile, spill registers, or need more shared
memory than a block may use.

Written by `python -m etude.bench.compiled_kernels` from what the compiler says (results/kernels-compiled.json). Keys:
kernel, target, and the form of a launch as `kernels.launch.Fitting` names it. A target that is not here is offered
everything.
"""

__all__ = ["UNFIT"]

# fmt: off
UNFIT: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("orientations.both_kernel", "sm_90", "bfloat16 SOURCE 3 ROWS 3 COLUMNS 0 SWIZZLE 0"): (
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_100", "bfloat16 SOURCE 3 ROWS 3 COLUMNS 0 SWIZZLE 1"): (
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_90", "bfloat16 SOURCE 0 ROWS 3 COLUMNS 2 SWIZZLE 0"): (
        "BM 32 BN 128, 4 warps, 1 stages",
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_100", "bfloat16 SOURCE 0 ROWS 3 COLUMNS 2 SWIZZLE 1"): (
        "BM 32 BN 128, 4 warps, 1 stages",
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_90", "bfloat16 SOURCE 0 ROWS 3 COLUMNS 0 SWIZZLE 0"): (
        "BM 32 BN 128, 4 warps, 1 stages",
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_100", "bfloat16 SOURCE 0 ROWS 3 COLUMNS 0 SWIZZLE 1"): (
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_90", "bfloat16 SOURCE 1 ROWS 3 COLUMNS 2 SWIZZLE 0"): (
        "BM 32 BN 128, 4 warps, 1 stages",
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_100", "bfloat16 SOURCE 1 ROWS 3 COLUMNS 2 SWIZZLE 1"): (
        "BM 32 BN 128, 4 warps, 1 stages",
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_90", "bfloat16 SOURCE 1 ROWS 3 COLUMNS 0 SWIZZLE 0"): (
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_100", "bfloat16 SOURCE 1 ROWS 3 COLUMNS 0 SWIZZLE 1"): (
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_90", "uint8 SOURCE 4 ROWS 3 COLUMNS 2 SWIZZLE 0"): (
        "BM 32 BN 128, 4 warps, 1 stages",
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_100", "uint8 SOURCE 4 ROWS 3 COLUMNS 2 SWIZZLE 1"): (
        "BM 32 BN 128, 4 warps, 1 stages",
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_90", "uint8 SOURCE 4 ROWS 3 COLUMNS 0 SWIZZLE 0"): (
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.both_kernel", "sm_100", "uint8 SOURCE 4 ROWS 3 COLUMNS 0 SWIZZLE 1"): (
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
        "BM 32 BN 256, 4 warps, 1 stages",
    ),
    ("orientations.swiglu_gradient_kernel", "sm_90", "bfloat16 SWIZZLE 0"): (
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
    ),
    ("orientations.swiglu_gradient_kernel", "sm_100", "bfloat16 SWIZZLE 1"): (
        "BM 64 BN 128, 4 warps, 1 stages",
        "BM 128 BN 128, 8 warps, 1 stages",
    ),
    ("gemm.matmul_kernel", "sm_100", "bfloat16 FORM 0 BBLOCK 1"): (
        "BM 64 BN 64 BK 64, 4 warps, 3 stages",
        "BM 128 BN 128 BK 64, 4 warps, 4 stages",
    ),
    ("gemm.matmul_kernel", "gfx950", "bfloat16 FORM 0 BBLOCK 1"): (
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
    ),
    ("gemm.matmul_kernel", "sm_90", "uint8 FORM 1 BBLOCK 128"): (
        "BM 128 BN 128 BK 64, 4 warps, 4 stages",
    ),
    ("gemm.matmul_kernel", "sm_100", "uint8 FORM 1 BBLOCK 128"): (
        "BM 128 BN 128 BK 64, 4 warps, 4 stages",
    ),
    ("gemm.matmul_kernel", "sm_90", "uint8 FORM 1 BBLOCK 1"): (
        "BM 128 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
        "BM 128 BN 128 BK 64, 8 warps, 3 stages",
        "BM 128 BN 64 BK 64, 4 warps, 4 stages",
    ),
    ("gemm.matmul_kernel", "sm_100", "uint8 FORM 1 BBLOCK 1"): (
        "BM 128 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
        "BM 128 BN 128 BK 64, 8 warps, 3 stages",
        "BM 64 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 64 BK 64, 4 warps, 4 stages",
    ),
    ("gemm.matmul_kernel", "sm_90", "uint8 FORM 2 BBLOCK 1"): (
        "BM 128 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
        "BM 64 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 64 BK 64, 4 warps, 4 stages",
    ),
    ("gemm.matmul_kernel", "sm_90", "uint8 FORM 3 BBLOCK 1"): (
        "BM 128 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
        "BM 128 BN 128 BK 64, 8 warps, 3 stages",
        "BM 64 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 64 BK 64, 4 warps, 4 stages",
    ),
    ("gemm.matmul_kernel", "gfx950", "uint8 FORM 3 BBLOCK 1"): (
        "BM 128 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
        "BM 128 BN 128 BK 64, 8 warps, 3 stages",
    ),
    ("grouped_gemm.rows_kernel", "gfx950", "bfloat16 FORM 0 BBLOCK 1"): (
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
    ),
    ("grouped_gemm.weights_kernel", "gfx950", "bfloat16 FORM 0"): (
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
    ),
    ("grouped_gemm.rows_kernel", "sm_90", "uint8 FORM 1 BBLOCK 128"): (
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
        "BM 64 BN 128 BK 64, 4 warps, 4 stages",
    ),
    ("grouped_gemm.rows_kernel", "sm_100", "uint8 FORM 1 BBLOCK 128"): (
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
    ),
    ("grouped_gemm.rows_kernel", "gfx950", "uint8 FORM 1 BBLOCK 128"): (
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
    ),
    ("grouped_gemm.weights_kernel", "sm_90", "uint8 FORM 1"): (
        "BM 128 BN 128 BK 64, 8 warps, 3 stages",
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
    ),
    ("grouped_gemm.weights_kernel", "sm_100", "uint8 FORM 1"): (
        "BM 128 BN 128 BK 64, 8 warps, 3 stages",
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
    ),
    ("grouped_gemm.weights_kernel", "gfx950", "uint8 FORM 1"): (
        "BM 128 BN 128 BK 64, 8 warps, 3 stages",
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
    ),
    ("grouped_gemm.rows_kernel", "sm_90", "uint8 FORM 2 BBLOCK 1"): (
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
        "BM 64 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
    ),
    ("grouped_gemm.rows_kernel", "gfx950", "uint8 FORM 2 BBLOCK 1"): (
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
    ),
    ("grouped_gemm.weights_kernel", "sm_90", "uint8 FORM 2"): (
        "BM 128 BN 128 BK 64, 8 warps, 3 stages",
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
        "BM 64 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
        "BM 64 BN 64 BK 64, 4 warps, 3 stages",
    ),
    ("grouped_gemm.weights_kernel", "gfx950", "uint8 FORM 2"): (
        "BM 128 BN 128 BK 64, 8 warps, 3 stages",
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
    ),
    ("grouped_gemm.rows_kernel", "sm_90", "uint8 FORM 3 BBLOCK 1"): (
        "BM 128 BN 128 BK 64, 8 warps, 3 stages",
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
        "BM 64 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
        "BM 64 BN 64 BK 32, 4 warps, 3 stages",
    ),
    ("grouped_gemm.rows_kernel", "gfx950", "uint8 FORM 3 BBLOCK 1"): (
        "BM 128 BN 128 BK 64, 8 warps, 3 stages",
        "BM 128 BN 256 BK 64, 8 warps, 3 stages",
        "BM 64 BN 128 BK 64, 4 warps, 4 stages",
        "BM 128 BN 128 BK 128, 8 warps, 3 stages",
    ),
    ("linear_logprob.forward_kernel", "sm_90", "bfloat16 KL 0"): (
        "BM 64 BV 256 BK 64, 8 warps, 3 stages",
    ),
    ("linear_logprob.forward_kernel", "sm_100", "bfloat16 KL 0"): (
        "BM 128 BV 128 BK 64, 8 warps, 3 stages",
        "BM 64 BV 256 BK 64, 8 warps, 3 stages",
        "BM 64 BV 128 BK 64, 4 warps, 4 stages",
    ),
    ("linear_logprob.forward_kernel", "sm_90", "bfloat16 KL 1"): (
        "BM 128 BV 128 BK 64, 8 warps, 3 stages",
        "BM 64 BV 256 BK 64, 8 warps, 3 stages",
        "BM 64 BV 128 BK 64, 4 warps, 4 stages",
    ),
    ("linear_logprob.forward_kernel", "sm_100", "bfloat16 KL 1"): (
        "BM 128 BV 128 BK 64, 8 warps, 3 stages",
        "BM 64 BV 256 BK 64, 8 warps, 3 stages",
        "BM 64 BV 128 BK 64, 4 warps, 4 stages",
        "BM 64 BV 64 BK 64, 4 warps, 4 stages",
    ),
    ("linear_logprob.backward_kernel", "sm_90", "bfloat16 MODE 1"): (
        "BM 128 BV 128 BK 64, 8 warps, 3 stages",
    ),
    ("linear_logprob.backward_kernel", "sm_100", "bfloat16 MODE 1"): (
        "BM 128 BV 128 BK 64, 8 warps, 3 stages",
    ),
    ("linear_logprob.forward_kernel", "sm_90", "float32 KL 1"): (
        "BM 64 BV 64 BK 32, 4 warps, 3 stages",
    ),
    ("linear_logprob.forward_kernel", "sm_100", "float32 KL 1"): (
        "BM 64 BV 64 BK 32, 4 warps, 3 stages",
    ),
    ("muon.symmetric_kernel", "sm_100", "bfloat16 ADD 0"): (
        "BM 64 BK 64, 4 warps, 4 stages",
    ),
    ("block_scaled.scaled_rows_kernel", "sm_100", "float8_e4m3fn FORM 2"): (
        "BN 128 BK 256, 4 warps, 3 stages",
    ),
    ("block_scaled.scaled_rows_kernel", "sm_100", "uint8 FORM 3"): (
        "BN 128 BK 256, 4 warps, 3 stages",
    ),
}
