// One exception type for everything the core refuses; its kind names the class of kvasir.errors that Python sees.
#pragma once

#include <stdexcept>
#include <string>

namespace kvasir {

enum class Kind {
    BadOption,
    BadGrammar,
    BadSchema,
    TokenizeFailed,
    ModelLoadError,
    ModelNotFound,
    Unsupported,
    Closed,
    EngineStopped,
};

class Error : public std::runtime_error {
  public:
    Error(Kind kind, const std::string &message) : std::runtime_error(message), kind(kind) {}
    const Kind kind;
};

}  // namespace kvasir
