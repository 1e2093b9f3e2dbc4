package mount

import (
	"errors"
	"strings"
)

// NFS is a directory of a server.
type NFS struct {
	// Server is a name or an address. An IPv6 address has no brackets.
	Server string
	// Path is the absolute path on the server.
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

// ParseNFSSource parses a result of String. ok is false if s has another format.
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

// Errors that MountNFS wraps.
var (
	// ErrServerName means that the name of the server does not resolve.
	ErrServerName = errors.New("the name of the NFS server does not resolve: correct it, or the name service of this node")
	// ErrServerSilent means that the server does not answer, or does not answer as an NFS server.
	ErrServerSilent = errors.New("the NFS server does not answer: check that it runs, and the network and firewalls between it and this node")
	// ErrExportMissing means that the server does not have the directory.
	ErrExportMissing = errors.New("the NFS server has no such directory: correct the path, or create and export the directory on the server")
	// ErrExportDenied means that the server denies access to this node.
	ErrExportDenied = errors.New("the NFS server denies this node: allow the node in the server's exports; if the export requires Kerberos, set sec=krb5, krb5i or krb5p in mountOptions")
	// ErrKerberos means that a mount with Kerberos is denied, by the server or because this node has no ticket.
	ErrKerberos = errors.New("the NFS server denies this node, or this node has no valid Kerberos ticket: check rpc.gssd and its log (journalctl -u rpc-gssd), the keytab of this node (klist -k), the KDC, and on the server the mapping of the principal of this node to root, and whether the export allows this value of sec=")
	// ErrNoGSSD means that a mount needs Kerberos, and that rpc.gssd does not run on this node, or not in the network of
	// this process.
	ErrNoGSSD = errors.New("Kerberos needs rpc.gssd, which does not run in the network of this process: install nfs-common or nfs-utils on the node, run systemctl start rpc-gssd, and give the driver's pod the network of the node (hostNetwork; the chart's value nfs.kerberos)") //nolint:staticcheck // a name begins the text
	// ErrKerberosRefused means that the kernel refuses a mount with Kerberos, without a known reason.
	ErrKerberosRefused = errors.New("the kernel refuses this mount with Kerberos: check that rpc.gssd runs on the node (systemctl start rpc-gssd), that the driver's pod has the network of the node (hostNetwork; the chart's value nfs.kerberos), that the module rpcsec_gss_krb5 is loaded (modprobe rpcsec_gss_krb5), and the mount options")
	// ErrPrivacy means that a mount with Kerberos failed with an I/O error, as sec=krb5p does with some kernels.
	ErrPrivacy = errors.New("the mount with Kerberos failed with an I/O error: with sec=krb5p run a newer kernel on the node and the server (Linux 6.1.192 fails), or set sec=krb5i; otherwise check the log of the server")
	// ErrNoTLSHD means that a mount needs TLS, and that tlshd does not run in the network of this process.
	ErrNoTLSHD = errors.New("xprtsec needs tlshd in the network of this process: install ktls-utils on the node, run systemctl start tlshd, and give the driver's pod the network of the node (hostNetwork; for the controller the chart's value nfs.kerberos)")
	// ErrTLSDenied means that a mount with TLS was denied, by the server or because the handshake failed.
	ErrTLSDenied = errors.New("the NFS server denies this node, or one of them does not trust the certificate of the other: read the log of tlshd on the node and on the server (journalctl -u tlshd), and allow the node in the server's exports; if the export requires Kerberos, set sec=krb5, krb5i or krb5p in mountOptions")
	// ErrNoTLS means that the kernel has no NFS over TLS.
	ErrNoTLS = errors.New("this kernel has no NFS over TLS: xprtsec needs Linux 6.5 or newer: remove xprtsec from the mount options, or run a newer kernel")
	// ErrNFSVersion means that the server or the kernel supports none of the requested versions.
	ErrNFSVersion = errors.New("the NFS server or this kernel does not support that version: change nfsvers, or enable the version on the server")
	// ErrNoStatd means that NFS version 3 locks need rpc.statd, which does not run on this node.
	ErrNoStatd = errors.New("NFS version 3 locks need rpc.statd on this node: start it, or add nolock to the mount options")
	// ErrMayNotMount means that the process lacks CAP_SYS_ADMIN.
	ErrMayNotMount = errors.New("this process may not mount: run it with CAP_SYS_ADMIN (the chart's value nfs.enabled gives the controller this capability)")
	// ErrNoNFS means that the kernel has no NFS client.
	ErrNoNFS = errors.New("this kernel has no NFS client: load or install its nfs module")
)

// CheckNFSOptions returns ErrBadOption for mount flags that would mount another directory, that only
// mount.nfs(8) supports, or that MountNFS sets itself. The kernel checks the others when it mounts.
func CheckNFSOptions(words []string) error {
	_, err := parseNFSOptions(words)
	return err
}
