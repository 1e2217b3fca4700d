// Questions that come one after the other, so that what was read for one of them serves the others.
//
//   standard input                                                 standard output
//   {"arguments": ["--format=json", ...], "input": "..."}   ──>    {"status": 0, "printed": "...", "said": "..."}
//
// Each is a line of JSON, and stands for a call of the program with these arguments and this standard input.
#pragma once

#include <string>
#include <vector>

#include "console.hpp"

namespace pipeedge::cli {

// The console of the call that a question stands for.
class QuestionConsole : public Console {
 public:
  // `called`: what the user calls this program.
  explicit QuestionConsole(const std::string& called) : Console(called) {}

  // Takes the input from a question and returns the arguments. Throws yaml::SpecError.
  std::vector<std::string> ask(const std::string& question);
  // The answer, with the exit status of the call.
  std::string answer(int status) const;

  std::string input() override { return input_; }
  void print(const std::string& text) override { printed_ += text; }
  void tell(const std::string& text) override { said_ += text; }

 private:
  std::string input_;
  std::string printed_;
  std::string said_;
};

}  // namespace pipeedge::cli
