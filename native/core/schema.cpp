#include "schema.hpp"

#include <set>
#include <vector>

#include "error.hpp"
#include "json-schema-to-grammar.h"
#include "json.h"
#include "nesting.hpp"
#include "runtime.hpp"

namespace kvasir {

namespace {

constexpr size_t MAX_SCHEMA_BYTES = 4 << 20;
constexpr size_t MAX_NAME = 1000;      // bytes; llama.cpp overflows its stack at some ten thousands
constexpr size_t MAX_MEMBERS = 500;    // of one object: two seconds
constexpr size_t MAX_REF_DEPTH = 300;  // levels, references included: threads with 512 KiB of stack survive 400

[[noreturn]] void bad_schema(const std::string &why) {
    throw Error(Kind::BadSchema, "this JSON schema cannot be enforced: it " + why + ".");
}

std::string counted(size_t n, const std::string &what) { return "has more than " + std::to_string(n) + " " + what; }

// Where a reference into the document leads, found as llama.cpp finds it; nullptr where it leads nowhere.
const common_json *target_of(const common_json &root, const std::string &ref) {
    if (ref.compare(0, 2, "#/") != 0) return nullptr;
    const common_json *here = &root;
    for (size_t at = 2; at <= ref.size();) {
        const size_t end = std::min(ref.find('/', at), ref.size());
        const std::string step = ref.substr(at, end - at);
        if (!here->is_object() || !here->contains(step)) return nullptr;
        here = &here->at(step);
        at = end + 1;
    }
    return here;
}

struct Place {
    const common_json *node;
    size_t depth;
};

void check_object(const common_json &root, const Place &place, std::vector<Place> &todo) {
    if (place.node->contains("properties") && place.node->at("properties").is_object() &&
        place.node->at("properties").size() > MAX_MEMBERS) {
        bad_schema(counted(MAX_MEMBERS, "members in one object"));
    }
    for (const auto &[key, value] : place.node->items()) {
        if (key.size() > MAX_NAME) bad_schema(counted(MAX_NAME, "bytes in a name"));
        if (key == "$ref" && value.is_string()) {
            const auto ref = value.template get<std::string>();
            if (ref.size() > MAX_NAME) bad_schema(counted(MAX_NAME, "bytes in a reference"));
            if (const common_json *target = target_of(root, ref)) todo.push_back({target, place.depth + 1});
        } else if (key != "$defs" && key != "definitions") {
            todo.push_back({&value, place.depth + 1});
        }
    }
}

// Walks as the converter does: in depth, each target of a reference once.
void check_reach(const common_json &root) {
    std::set<const common_json *> seen;
    std::vector<Place> todo = {{&root, 0}};
    while (!todo.empty()) {
        const Place place = todo.back();
        todo.pop_back();
        if (!seen.insert(place.node).second) continue;
        if (place.depth > MAX_REF_DEPTH) bad_schema(counted(MAX_REF_DEPTH, "levels along its references"));
        if (place.node->is_object()) check_object(root, place, todo);
        if (place.node->is_array()) {
            for (const auto &item : *place.node) {
                todo.push_back({&item, place.depth + 1});
            }
        }
    }
}

}  // namespace

void check_schema_limits(const std::string &schema_json) {
    if (schema_json.size() > MAX_SCHEMA_BYTES) bad_schema(counted(MAX_SCHEMA_BYTES, "bytes"));
    if (deepest_nesting(bare(schema_json, false), "{[", "}]") > MAX_NESTING) {
        throw Error(Kind::BadSchema,
                    "this JSON schema nests more than " + std::to_string(MAX_NESTING) + " levels; use $defs and $ref.");
    }
    try {
        check_reach(common_json::parse(schema_json));
    } catch (const common_json_error &e) {
        bad_schema(std::string("is no JSON, ") + e.what());
    }
}

std::string json_schema_to_gbnf(const std::string &schema_json) {
    ensure_backend();
    check_schema_limits(schema_json);
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
