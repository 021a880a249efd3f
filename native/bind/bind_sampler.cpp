#include "../core/context.hpp"
#include "../core/sampler.hpp"
#include "bind.hpp"

using kvasir::Context;
using kvasir::Sampler;
using kvasir::SamplerParams;
using kvasir::Vocab;

void bind_sampler(nb::module_ &m) {
    nb::class_<SamplerParams>(m, "SamplerParams", "A sampler chain as a plain value; every field can be set.")
        .def(nb::init<>())
        .def_rw("seed", &SamplerParams::seed)
        .def_rw("order", &SamplerParams::order)
        .def_rw("temperature", &SamplerParams::temperature)
        .def_rw("dynatemp_range", &SamplerParams::dynatemp_range)
        .def_rw("dynatemp_exponent", &SamplerParams::dynatemp_exponent)
        .def_rw("top_k", &SamplerParams::top_k)
        .def_rw("top_p", &SamplerParams::top_p)
        .def_rw("min_p", &SamplerParams::min_p)
        .def_rw("min_keep", &SamplerParams::min_keep)
        .def_rw("typical_p", &SamplerParams::typical_p)
        .def_rw("top_n_sigma", &SamplerParams::top_n_sigma)
        .def_rw("xtc_probability", &SamplerParams::xtc_probability)
        .def_rw("xtc_threshold", &SamplerParams::xtc_threshold)
        .def_rw("penalty_last_n", &SamplerParams::penalty_last_n)
        .def_rw("repeat_penalty", &SamplerParams::repeat_penalty)
        .def_rw("frequency_penalty", &SamplerParams::frequency_penalty)
        .def_rw("presence_penalty", &SamplerParams::presence_penalty)
        .def_rw("dry_multiplier", &SamplerParams::dry_multiplier)
        .def_rw("dry_base", &SamplerParams::dry_base)
        .def_rw("dry_allowed_length", &SamplerParams::dry_allowed_length)
        .def_rw("dry_penalty_last_n", &SamplerParams::dry_penalty_last_n)
        .def_rw("dry_sequence_breakers", &SamplerParams::dry_sequence_breakers)
        .def_rw("mirostat", &SamplerParams::mirostat)
        .def_rw("mirostat_tau", &SamplerParams::mirostat_tau)
        .def_rw("mirostat_eta", &SamplerParams::mirostat_eta)
        .def_rw("adaptive_target", &SamplerParams::adaptive_target)
        .def_rw("adaptive_decay", &SamplerParams::adaptive_decay)
        .def_rw("logit_bias", &SamplerParams::logit_bias)
        .def_rw("ignore_eos", &SamplerParams::ignore_eos)
        .def_rw("grammar", &SamplerParams::grammar)
        .def_rw("grammar_root", &SamplerParams::grammar_root)
        .def_rw("grammar_lazy", &SamplerParams::grammar_lazy)
        .def_rw("grammar_trigger_patterns", &SamplerParams::grammar_trigger_patterns)
        .def_rw("grammar_trigger_tokens", &SamplerParams::grammar_trigger_tokens)
        .def_rw("grammar_prefill", &SamplerParams::grammar_prefill)
        .def_rw("reasoning_budget", &SamplerParams::reasoning_budget)
        .def_rw("reasoning_start", &SamplerParams::reasoning_start)
        .def_rw("reasoning_ends", &SamplerParams::reasoning_ends)
        .def_rw("reasoning_forced", &SamplerParams::reasoning_forced)
        .def_rw("reasoning_prefill", &SamplerParams::reasoning_prefill);

    nb::class_<Sampler>(m, "Sampler", "One sequence's sampler chain. Draw i depends on (seed, i) alone.")
        .def(
            "__init__",
            [](Sampler *self, const Vocab &vocab, const SamplerParams &params) {
                const SamplerParams copy = params;  // it may be changed while the GIL is free
                const nb::gil_scoped_release unlocked;
                new (self) Sampler(vocab, copy);
            },
            "vocab"_a, "params"_a)
        .def(
            "sample", [](Sampler &s, Context &context, int32_t row) { return context.sample(s, row); }, "context"_a,
            "row"_a, Unlocked(), "Picks a token for row `row` of the context's last step, and accepts it.")
        .def("accept", &Sampler::accept, "token"_a, "generated"_a = true, Unlocked(),
             "Tells the chain of a token it did not sample; generated=False for prompt tokens, which move only the "
             "penalties.")
        .def("accept_prompt", &Sampler::accept_prompt, "tokens"_a, Unlocked(), "Tells the chain of a whole prompt.")
        .def("reset", &Sampler::reset, Unlocked(), "Back to the state before the first token.")
        .def("clone", &Sampler::clone, Unlocked(), "An independent copy with the same state.")
        .def("seek", &Sampler::seek, "index"_a, Unlocked(),
             "Sets the index of the next draw, to resume an interrupted generation.")
        .def_prop_ro("names", &Sampler::names, "The chain as built, in order.")
        .def_prop_ro("seed", &Sampler::seed)
        .def_prop_ro("n_draws", &Sampler::n_draws, Unlocked());
}
