// Package backendtest is the one suite that every backend passes: what users
// rely on and csi-sanity does not check. It drives a whole driver over its
// socket, as an orchestrator does, on real devices and mounts.
package backendtest
