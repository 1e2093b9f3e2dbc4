package mount

import (
	"context"
	"errors"
	"strings"
)

// NFS is a directory of a server.
type NFS struct {
	// Server is a name or an address, IPv6 without brackets.
	Server string
	// Path is absolute, as the server has it.
	Path string
	// Options are mount flags, as nfs(5) has them.
	Options []string
}

// Source is the directory as the mount table shows it: server:/path, with
// brackets around an IPv6 address.
func (n NFS) Source() string {
	if strings.Contains(n.Server, ":") {
		return "[" + n.Server + "]:" + n.Path
	}
	return n.Server + ":" + n.Path
}

// ParseNFSSource takes apart what Source made.
func ParseNFSSource(s string) (server, path string, ok bool) {
	server, path, ok = strings.Cut(s, ":/")
	if rest, bracketed := strings.CutPrefix(s, "["); bracketed {
		server, path, ok = strings.Cut(rest, "]:/")
		ok = ok && strings.Contains(server, ":")
	} else {
		ok = ok && !strings.Contains(server, ":")
	}
	if !ok || server == "" || strings.ContainsAny(server, "/[]") {
		return "", "", false
	}
	return server, "/" + path, true
}

// What MountNFS fails with, for errors.Is.
var (
	// ErrServerName: the name has no address.
	ErrServerName = errors.New("the name of the NFS server does not resolve: correct it, or the name service of this node")
	// ErrServerSilent: no answer from the server, or none that is NFS.
	ErrServerSilent = errors.New("the NFS server does not answer: check that it runs, and the network and firewalls between it and this node")
	// ErrExportMissing: the server has no such directory.
	ErrExportMissing = errors.New("the NFS server has no such directory: correct the path, or make and export it there")
	// ErrExportDenied: the server does not let this node in.
	ErrExportDenied = errors.New("the NFS server denies this node: allow it in the server's exports")
	// ErrNFSVersion: the server speaks none of the versions tried.
	ErrNFSVersion = errors.New("the NFS server or this kernel does not speak that version: change nfsvers, or enable it there")
	// ErrNoStatd: version 3 has its locks from rpc.statd, which does not run here.
	ErrNoStatd = errors.New("NFS version 3 locks need rpc.statd on this node: start it, or add nolock to the mount options")
	// ErrMayNotMount: the process lacks the right.
	ErrMayNotMount = errors.New("this process may not mount: run it with CAP_SYS_ADMIN (the chart's value nfs.enabled gives it to the controller)")
	// ErrNoNFS: no client in this kernel.
	ErrNoNFS = errors.New("this kernel has no NFS client: load or install its nfs module")
)

// CheckNFSOptions refuses mount flags that would mount something else, that speak
// to mount.nfs(8) alone, or that the driver sets itself: ErrBadOption. Other words
// are checked by the kernel when it mounts.
func CheckNFSOptions(words []string) error {
	_, err := parseNFSOptions(words)
	return err
}

// MountNFS mounts a directory of a server without showing it anywhere, with attr
// (MOUNT_ATTR_*) on the mount, and returns the version of NFS that was agreed on,
// such as "4.2". Without a version in the options it is the highest of 4.2, 4.1,
// 4.0 and 3 that the server has. When ctx ends before the kernel is done, one
// thread stays behind until the kernel gives up. Errors are *Error with one of
// ErrServerName, ErrServerSilent, ErrExportMissing, ErrExportDenied,
// ErrNFSVersion, ErrNoStatd, ErrNoNFS or ErrBadOption where that is the reason.
func MountNFS(ctx context.Context, n NFS, attr uint64) (*Detached, string, error) { //nolint:revive // NFS alone is the type
	return mountNFS(ctx, n, attr)
}
