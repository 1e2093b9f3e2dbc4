// Package cgroup limits the I/O of pods on block devices, with io.max of cgroup v2. It finds the cgroups that a kubelet
// creates for its pods, with either of its cgroup drivers, and changes no other file of them.
package cgroup
