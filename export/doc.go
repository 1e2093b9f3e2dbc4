// Package export protects the driver from an NFS server that does not answer. A thread that
// uses a file of such a server may hang until its process is killed, so the driver itself has
// no file and no mount of any server. Each nfs pool is served by a worker: a child process with
// the same Controller and Node services.
//
// In the driver: Relay sends a call to the worker that it concerns (relay.go, list.go), Pools
// has the workers (pools.go), Worker starts, watches and kills the process of one pool
// (worker.go, process.go), and server asks an NFS server whether it answers, over a connection
// of its own (server.go). None of this touches a file or a mount of a server.
//
// In the worker's process: Run serves one pool (run.go), with a limit for calls (calls.go), on
// a base mount (mount.go, base.go). Job and Report are what both sides exchange (job.go).
package export
