// Tables of options: how they are written, read and explained.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "options.hpp"

namespace pipeedge::cli {

// An option: its names, its parser, and its text in --help.
struct Option {
  std::vector<const char*> names;  // "-b", "--batch-size"
  const char* value;               // placeholder of its value in the help; null for a flag
  const char* help;                // lines separated by \n
  std::function<void(CommandLine&, const std::string& name, const std::string& value)> read;
};

struct Group {
  const char* title;
  std::vector<Option> options;
};

// The value of an option as a number, name or list of names; they throw UsageError if it is none.

// A whole number in digits, within [least, most].
double whole_number(const std::string& option, const std::string& text, double least, double most);
int link_bits(const std::string& option, const std::string& text);
double positive_number(const std::string& option, const std::string& text);
std::string nonempty(const std::string& name, const std::string& value);
std::vector<std::string> names(const std::string& option, const std::string& value);

// The options of --plan auto.
Group joint_group();

// Throws UsageError if options need --plan auto or cannot be combined with it. `given`: last names of all options.
void check_joint(const CommandLine& line, const std::vector<std::string>& given);

}  // namespace pipeedge::cli
