#include "schema.hpp"

#include "error.hpp"
#include "json-schema-to-grammar.h"
#include "json.h"
#include "nesting.hpp"
#include "runtime.hpp"

namespace kvasir {

std::string json_schema_to_gbnf(const std::string &schema_json) {
    ensure_backend();
    if (deepest_nesting(bare(schema_json, false), "{[", "}]") > MAX_NESTING) {
        throw Error(Kind::BadSchema,
                    "this JSON schema nests more than " + std::to_string(MAX_NESTING) + " levels; use $defs and $ref.");
    }
    std::string grammar;
    with_abort_trap(Kind::BadSchema, "converting the schema", [&] {
        try {
            grammar = json_schema_to_grammar(common_json::parse(schema_json), true);
        } catch (const std::exception &e) {
            throw Error(Kind::BadSchema, std::string("this JSON schema cannot be enforced: ") + e.what() + ".");
        }
    });
    return grammar;
}

}  // namespace kvasir
