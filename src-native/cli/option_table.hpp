// Tables of options: how they are written, read and explained.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "options.hpp"

namespace pipeedge::cli {

// Puts the value of an option, given by one of its names, into the command line. Throws UsageError if it is invalid.
using Reader = std::function<void(CommandLine&, const std::string& name, const std::string& value)>;

// An option: its names, its text in --help, and its parser.
struct Option {
  std::vector<const char*> names;  // "-b", "--batch-size"
  const char* value;               // placeholder of its value in the help; null for a flag
  const char* help;
  Reader read;
};

inline Option option(std::vector<const char*> names, const char* value, const char* help, Reader read) {
  return {std::move(names), value, help, std::move(read)};
}

struct Group {
  const char* title;
  std::vector<Option> options;
};

// Readers that parse the value, and assign it to a member of the command line or of a part of it.
template <typename Value, typename Parse>
Reader into(Value CommandLine::*member, Parse parse) {
  return [=](CommandLine& c, const std::string& n, const std::string& v) { c.*member = parse(n, v); };
}
template <typename Part, typename Value, typename Parse>
Reader into(Part CommandLine::*part, Value Part::*member, Parse parse) {
  return [=](CommandLine& c, const std::string& n, const std::string& v) { c.*part.*member = parse(n, v); };
}
template <typename Part, typename Inner, typename Value, typename Parse>
Reader into(Part CommandLine::*part, Inner Part::*inner, Value Inner::*member, Parse parse) {
  return [=](CommandLine& c, const std::string& n, const std::string& v) { c.*part.*inner.*member = parse(n, v); };
}
// Two readers, for a value with two places.
inline Reader both(Reader one, Reader other) {
  return [one = std::move(one), other = std::move(other)](CommandLine& c, const std::string& n, const std::string& v) {
    one(c, n, v);
    other(c, n, v);
  };
}
inline Reader flag(bool CommandLine::*member) {
  return [=](CommandLine& c, const std::string&, const std::string&) { c.*member = true; };
}

// Parsers of values. They throw UsageError, which begins with the name of the option.

// A whole number in digits, within [least, most].
double whole_number(const std::string& option, const std::string& text, double least, double most);
int link_bits(const std::string& option, const std::string& text);
double positive_number(const std::string& option, const std::string& text);
double fraction(const std::string& option, const std::string& text);  // from 0 to 1
std::string nonempty(const std::string& option, const std::string& text);
// "A,B,..." without empty entries.
std::vector<std::string> names(const std::string& option, const std::string& text);
// The two parts of "A=B", around the last separator; `form` is for the message.
std::pair<std::string, std::string> pair_of(const std::string& option, const std::string& text, char separator,
                                            const char* form);
[[noreturn]] void no_such_word(const std::string& option, const std::string& text,
                               const std::vector<std::string>& known);

// One of some words, which stand for values.
template <typename Value>
auto one_of(std::vector<std::pair<const char*, Value>> known) {
  return [=](const std::string& option, const std::string& text) {
    std::vector<std::string> words;
    for (const auto& [one, value] : known) {
      if (text == one) return value;
      words.emplace_back(one);
    }
    no_such_word(option, text, words);
  };
}

inline auto whole(double least, double most) {
  return [=](const std::string& option, const std::string& text) { return whole_number(option, text, least, most); };
}

// A list, of which `parse` parses each entry.
template <typename Parse>
auto list_of(Parse parse) {
  return [=](const std::string& option, const std::string& text) {
    std::vector<decltype(parse(option, text))> values;
    for (const std::string& entry : names(option, text)) values.push_back(parse(option, entry));
    return values;
  };
}

// `text` in lines of 54 characters, all but the first indented.
std::string wrapped(const std::string& text, std::size_t indent);

// The options of --plan auto.
Group joint_group();

// Throws UsageError if options need --plan auto or cannot be combined with it. `given`: last names of all options.
void check_joint(const CommandLine& line, const std::vector<std::string>& given);

}  // namespace pipeedge::cli
