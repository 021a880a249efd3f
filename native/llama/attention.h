// Attention over F16 keys and values on x86: kernels of ours that ggml's CPU backend calls.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

// Let this process's CPU backend use it from now on; harmless when called again, and where the CPU has no AVX2.
void kvasir_use_attention(void);

#ifdef __cplusplus
}
#endif
