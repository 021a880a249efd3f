// The form of a reply as llama.cpp's parser knows it. Included by chat.cpp and chat_parser.cpp alone.
#pragma once

#include <bitset>
#include <string>
#include <vector>

#include "chat.h"
#include "peg-parser.h"

namespace kvasir {

struct ReplyForm {
    common_chat_format format = COMMON_CHAT_FORMAT_CONTENT_ONLY;
    std::string generation_prompt;
    std::vector<std::string> thinking_ends;  // without those that begin a call
    bool continued = false;                  // the prompt ends in a message of the assistant
    bool python_tag = false;                 // calls may come as Python behind Llama 3's tag
    std::string code_tool;                   // the tool that runs it
    std::bitset<256> signs;  // bytes that a marker may begin with: text without them goes on as it began
    common_peg_arena arena;  // empty: all is content. Loaded once and shared by every reply to the prompt
};

}  // namespace kvasir
