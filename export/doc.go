// Package export protects the driver from an NFS server that does not answer. A thread that
// uses a file of such a server may hang until its process is killed, so the driver itself uses
// no file and no mount of any server. Each nfs pool is served by a worker: a child process with
// the same Controller and Node services.
//
// In the driver: Relay sends each call to its worker (relay.go, list.go), Pools holds the
// workers (pools.go), Worker starts, watches and kills the process of one pool (worker.go,
// process.go), and server pings an NFS server over its own connection (server.go). None of this
// accesses a file or a mount of a server.
//
// In the worker's process: Run serves one pool (run.go), with a limit for calls (calls.go), on
// a base mount (mount.go, base.go). Both sides exchange Job and Report (job.go).
package export
