// JSON Schema to GBNF, through llama.cpp's common library. Strings in, strings out.
#pragma once

#include <string>

namespace kvasir {

// Raises BadSchema for what llama.cpp's converter does not survive: deep nesting, long chains of references, long
// names (its regular expressions recurse by character) and objects of very many members (its time grows by the cube).
void check_schema_limits(const std::string &schema_json);

std::string json_schema_to_gbnf(const std::string &schema_json);  // raises BadSchema

}  // namespace kvasir
