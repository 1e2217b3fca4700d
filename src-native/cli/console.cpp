#include "console.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "../yaml/tree.hpp"
#include "options.hpp"

namespace pipeedge::cli {
namespace {

std::string name_in(const std::string& path) {
  const std::string name = path.substr(path.rfind('/') + 1);
  return name.empty() ? "sched-pipeline" : name;
}

}  // namespace

StandardConsole::StandardConsole(const std::string& path) : Console(name_in(path)) {}

std::string StandardConsole::input() {
  std::string text;
  std::vector<char> chunk(std::size_t{1} << 16);
  while (const std::size_t got = std::fread(chunk.data(), 1, chunk.size(), stdin)) {
    if (text.size() + got > yaml::kMaxFileBytes) throw UsageError("standard input is larger than 64 MiB");
    text.append(chunk.data(), got);
  }
  if (std::ferror(stdin) != 0) throw UsageError("standard input cannot be read completely");
  return text;
}

void StandardConsole::print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    if (errno != EPIPE) throw std::runtime_error("cannot write to standard output");
  }
}

void StandardConsole::tell(const std::string& text) { std::fputs(text.c_str(), stderr); }

std::size_t StandardConsole::room() const {
  if (isatty(STDERR_FILENO) == 0) return 0;
  const char* given = std::getenv("COLUMNS");
  const int columns = given != nullptr ? std::atoi(given) : 0;
  if (columns > 0) return static_cast<std::size_t>(columns);
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

}  // namespace pipeedge::cli
