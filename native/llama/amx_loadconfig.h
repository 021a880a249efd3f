// GCC before 11.5, 12.4 and 13.3 tells its optimiser that _tile_loadconfig reads 8 bytes. It reads 64, so the stores
// that fill the rest are dropped, and the first AMX instruction of ggml is illegal. Forced into ggml's CPU sources
// there.
#pragma once

#ifdef __cplusplus
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%X0" ::"m"(*reinterpret_cast<const char (*)[64]>(config)))
#endif
