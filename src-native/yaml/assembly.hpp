// The problem that the scheduler's files describe together, for one request.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "../core/problem.hpp"
#include "decoders.hpp"
#include "scaling.hpp"
#include "specs.hpp"

namespace pipeedge::yaml {

// What a plan chooses besides the cut and the hosts, and within which limits.
struct Choice {
  std::vector<double> batch_sizes;  // to choose from; empty: all profiled
  std::vector<std::string> dtypes;  // with or without "torch."; empty: all profiled
  std::vector<int> widths{0, 16, 8, 6, 4};
  double min_agreement = 0.99;  // 0: whatever was not measured is allowed, too
  double max_latency_s = kInfinity;
};

// A request for a schedule.
struct Request {
  std::string model = "google/vit-base-patch16-224";
  std::optional<Choice> choice;  // in place of batch_size, dtype and dtype_of
  double batch_size = 8;
  std::string dtype = "torch.float32";
  std::map<std::string, std::string> dtype_of;  // device type -> dtype; if not empty, other types are not used
  double buffers_in = 2;
  double buffers_out = 2;
  std::string data_host;           // empty: links from and to the data rank do not count
  double tokens = 0;               // of the longest sentence; 0: as profiled
  std::vector<Length> lengths;     // of the sentences; empty: all are as long as the longest
  std::string transport = "p2p";   // of the links, as profiles name it
  double input_bytes = -1;         // of one item of input; negative: according to models.yml and the dtype
  Texts texts;                     // of a decoder
  bool losses = false;             // whether to find out what losses cost
  std::vector<std::string> hosts;  // hosts to schedule on, from the devices file; empty: all
};

// A host that cannot be used, with the reason.
struct LeftOut {
  std::string host;
  std::string type;
  std::string why;
};

struct Assembly {
  std::optional<Texts> texts;         // of a decoder, complete
  Problem problem;                    // passes validate()
  std::vector<LeftOut> left_out;      // hosts that no setting can use
  std::vector<std::string> warnings;  // one line each
};

// Throws SpecError if the files do not contain what the request needs.
Assembly assemble(const Models& models, const DeviceTypes& types, const Devices& devices, const Neighbors* neighbors,
                  const Request& request);

}  // namespace pipeedge::yaml
