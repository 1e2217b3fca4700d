#include "questions.hpp"

#include "../yaml/tree.hpp"
#include "text.hpp"

namespace pipeedge::cli {

std::vector<std::string> QuestionConsole::ask(const std::string& question) {
  const yaml::Document document = yaml::parse(question, "question");
  const yaml::View root(document);
  std::vector<std::string> arguments;
  for (const yaml::View& one : root.at("arguments").items()) arguments.push_back(one.text());
  if (const auto input = root.find("input")) input_ = input->text();
  return arguments;
}

std::string QuestionConsole::answer(int status) const {
  return "{\"status\": " + std::to_string(status) + ", \"printed\": " + cli::quoted(printed_) +
         ", \"said\": " + cli::quoted(said_) + "}\n";
}

}  // namespace pipeedge::cli
