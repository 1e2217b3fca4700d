// Where the program reads and writes: its standard streams, or the texts of a question.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace pipeedge::cli {

class Console {
 public:
  // `called`: what the user calls this program; it stands in front of each line for people.
  explicit Console(std::string called) : called_(std::move(called)) {}
  virtual ~Console() = default;
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  const std::string& called() const { return called_; }
  // Everything that comes in. Throws UsageError if it is too much.
  virtual std::string input() = 0;
  // Puts out a result.
  virtual void print(const std::string& text) = 0;
  // Puts out text for people.
  virtual void tell(const std::string& text) = 0;
  // Puts out a line for people.
  void say(const std::string& line) { tell(called_ + ": " + line + "\n"); }
  // Width of the terminal that shows what is told, or 0 if none does.
  virtual std::size_t room() const { return 0; }

 private:
  std::string called_;
};

class StandardConsole : public Console {
 public:
  // `path`: argv[0], a path or, from `pipeedge schedule`, these words.
  explicit StandardConsole(const std::string& path);

  std::string input() override;
  // Throws std::runtime_error if standard output cannot be written, as on a full disk. A reader that has gone
  // away, as `head` does once it has seen enough, is no failure.
  void print(const std::string& text) override;
  void tell(const std::string& text) override;
  std::size_t room() const override;
};

}  // namespace pipeedge::cli
