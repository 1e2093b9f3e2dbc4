package mount

import (
	"errors"
	"strings"
)

// NFS is a directory of a server.
type NFS struct {
	// Server is a name or an address, IPv6 without brackets.
	Server string
	// Path is absolute, on the server.
	Path string
	// Options are mount flags (nfs(5)).
	Options []string
}

// String returns the directory in the format of the mount table: server:/path, with brackets around an
// IPv6 address.
func (n NFS) String() string {
	if strings.Contains(n.Server, ":") {
		return "[" + n.Server + "]:" + n.Path
	}
	return n.Server + ":" + n.Path
}

// ParseNFSSource parses a result of String.
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

// Errors of MountNFS, for errors.Is.
var (
	// ErrServerName: the name does not resolve.
	ErrServerName = errors.New("the name of the NFS server does not resolve: correct it, or the name service of this node")
	// ErrServerSilent: the server does not answer, or not as an NFS server.
	ErrServerSilent = errors.New("the NFS server does not answer: check that it runs, and the network and firewalls between it and this node")
	// ErrExportMissing: the server has no such directory.
	ErrExportMissing = errors.New("the NFS server has no such directory: correct the path, or create and export it there")
	// ErrExportDenied: the server denies access to this node.
	ErrExportDenied = errors.New("the NFS server denies this node: allow it in the server's exports")
	// ErrNFSVersion: the server supports none of the requested versions.
	ErrNFSVersion = errors.New("the NFS server or this kernel does not support that version: change nfsvers, or enable it there")
	// ErrNoStatd: locks of version 3 need rpc.statd, which does not run here.
	ErrNoStatd = errors.New("NFS version 3 locks need rpc.statd on this node: start it, or add nolock to the mount options")
	// ErrMayNotMount: the process lacks CAP_SYS_ADMIN.
	ErrMayNotMount = errors.New("this process may not mount: run it with CAP_SYS_ADMIN (the chart's value nfs.enabled gives it to the controller)")
	// ErrNoNFS: the kernel has no NFS client.
	ErrNoNFS = errors.New("this kernel has no NFS client: load or install its nfs module")
)

// CheckNFSOptions returns ErrBadOption for mount flags that would mount another directory, that only
// mount.nfs(8) supports, or that MountNFS sets itself. The kernel checks the others when it mounts.
func CheckNFSOptions(words []string) error {
	_, err := parseNFSOptions(words)
	return err
}
