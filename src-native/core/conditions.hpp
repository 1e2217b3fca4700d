// Other problems like a given one: the same hosts and links under measured conditions, or another cluster.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "problem.hpp"

namespace pipeedge {

// What a host is like when a plan runs, compared with its profile.
struct HostCondition {
  int host = 0;
  double slowness = 1;        // seconds of layers and of receiving and sending, as a multiple of the profile's
  double occupied_bytes = 0;  // memory that something else takes
};

struct LinkCondition {
  int from = 0;
  int to = 0;
  double slowness = 1;  // seconds of a transfer, as a multiple of what its speed promises
};

// The data rank's own work, in place of what profiles say.
struct DataWork {
  double feed_s = 0;
  double collect_s = 0;
  double input_send_s = 0;
  double output_receive_s = 0;
};

struct Conditions {
  std::vector<HostCondition> hosts;
  std::vector<LinkCondition> links;
  std::optional<DataWork> data_work;
};

// Throws std::invalid_argument for a number outside its range. A link's slowness holds for its own direction only.
Problem with_conditions(Problem problem, const Conditions& conditions);

// Removes a host and its links. It must not be the data host.
Problem without_host(Problem problem, int host);
// Keeps a host from running stages; as the data host, its links still count.
Problem without_stages_on(Problem problem, int host);
// Adds hosts of a device type, "NAME (new 1)" and so on; none if no setting has such a type.
Problem with_hosts(Problem problem, const std::string& type, int count);
Problem with_bandwidth(Problem problem, double factor);

}  // namespace pipeedge
