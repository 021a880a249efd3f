// Attention of a few queries over a long KV cache, on x86: a kernel of ours that ggml's CPU backend calls for it.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

// Let this process's CPU backend use it from now on; harmless when called again, and where the CPU has no AVX2.
void kvasir_use_attention(void);

#ifdef __cplusplus
}
#endif
