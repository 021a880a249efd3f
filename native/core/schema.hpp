// JSON Schema to GBNF, through llama.cpp's common library. Strings in, strings out.
#pragma once

#include <string>

namespace kvasir {

std::string json_schema_to_gbnf(const std::string &schema_json);  // raises BadSchema

}  // namespace kvasir
