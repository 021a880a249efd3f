#include "bind.hpp"

NB_MODULE(_native, m) {
    m.doc() = "llama.cpp under Kvasir: models, vocabularies, contexts, memory, samplers and chat templates.";
    bind_errors(m);
    bind_functions(m);
    bind_vocab(m);
    bind_model(m);
    bind_sampler(m);
    bind_context(m);
    bind_memory(m);
    bind_quantize(m);
    bind_chat(m);
}
