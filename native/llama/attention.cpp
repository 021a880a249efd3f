// Which attention this CPU backend computes: ours for F16 keys and values on AVX2 and AVX-512, ggml's for the rest.
//
// It is compiled into ggml's CPU archive, with its flags, and hooks in as ggml's own AMX and repacked kernels do: an
// "extra buffer type" that holds nothing is asked before every operation. Programs that do not call
// `kvasir_use_attention` run ggml's own.
#include "attention.h"

#include "attention_kernels.h"

#ifdef KVASIR_ATTENTION

#include <algorithm>
#include <iterator>
#include <mutex>

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

namespace {

using namespace kvasir_attention;

constexpr int64_t MANY = 16;  // queries of a stream; from there on unpacking keys and values pays
constexpr int64_t HEAD_SIZES[] = {32, 64, 80, 96, 112, 128, 256};  // those of attention_few.cpp

bool is_ours(const ggml_tensor *op) {
    if (op->op != GGML_OP_FLASH_ATTN_EXT) return false;
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    const float max_bias = param(op, 1), softcap = param(op, 2);
    return !sinks && max_bias == 0.0f && softcap == 0.0f && q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 &&
           v->type == GGML_TYPE_F16 && k->ne[0] == v->ne[0] &&
           std::find(std::begin(HEAD_SIZES), std::end(HEAD_SIZES), k->ne[0]) != std::end(HEAD_SIZES) &&
           k->ne[1] % TILE == 0 && (!mask || (mask->type == GGML_TYPE_F16 && mask->ne[2] == 1)) &&
           k->ne[2] == v->ne[2] && k->ne[3] == v->ne[3] && k->ne[3] == q->ne[3] && q->ne[2] / k->ne[2] <= MOST_SHARED &&
           q->nb[0] == sizeof(float) && k->nb[0] == sizeof(ggml_fp16_t) && v->nb[0] == sizeof(ggml_fp16_t);
}

class AttentionType : public ggml::cpu::extra_buffer_type {
  public:
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; }
    ggml::cpu::tensor_traits *get_tensor_traits(const ggml_tensor *op) override {
        if (!is_ours(op)) return nullptr;
        return op->src[0]->ne[1] < MANY ? &few_queries() : &many_queries();
    }
};

}  // namespace

void kvasir_use_attention(void) {
    static std::once_flag once;
    std::call_once(once, [] {
        // The list of types that weights may be kept in is made on first use: before ours is among them.
        ggml_backend_reg_t reg = ggml_backend_cpu_reg();
        auto get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
            ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts"));
        if (!get || !get(ggml_backend_reg_dev_get(reg, 0))) return;
        static AttentionType type;
        static ggml_backend_buffer_type holds_nothing = {};
        holds_nothing.context = &type;
        ggml_backend_cpu_get_extra_buffer_types().push_back(&holds_nothing);
    });
}

#else

void kvasir_use_attention(void) {}

#endif
