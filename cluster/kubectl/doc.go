// Package kubectl reads a cluster with the rights of a user, for `kubectl trivet`: the report of the drivers, which
// it fetches through a forwarded port, and the objects of Kubernetes that belong to volumes and snapshots. It also
// runs `trivet doctor` in the drivers' pods and reads their logs. It changes nothing; package move does.
package kubectl
