package mount

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/sunrpc"
)

// answerWithin is the time within which an address of a server must respond before the next one is
// tried. A TCP handshake with two lost packets takes 3 s.
const answerWithin = 5 * time.Second

// MountNFS creates a detached mount of a directory of a server, with the attributes attr (MOUNT_ATTR_*). It also
// returns the NFS version in use, such as "4.2". Without a version in the options the version in use is the highest
// of 4.2, 4.1, 4.0 and 3 that the server supports. If ctx ends before the kernel has mounted, one thread remains
// until the kernel times out. Errors are *Error, and wrap ErrServerName, ErrServerSilent, ErrExportMissing,
// ErrExportDenied, ErrKerberos, ErrNoGSSD, ErrKerberosRefused, ErrPrivacy, ErrNoTLS, ErrNoTLSHD, ErrTLSDenied,
// ErrNFSVersion, ErrNoStatd, ErrNoNFS, ErrMayNotMount or ErrBadOption if one of them describes the reason.
//
//nolint:revive // NFS alone is the type
func MountNFS(ctx context.Context, n NFS, attr uint64) (*Detached, string, error) {
	fail := func(op string, err error) (*Detached, string, error) {
		return nil, "", &Error{Op: op, Source: n.String(), FSType: "nfs", Err: err}
	}
	o, err := parseNFSOptions(n.Options)
	if err != nil {
		return nil, "", err
	}
	o.Attr |= attr
	if err := o.checkClient(); err != nil { // before ping, so that an error of this node is returned at once
		return fail("fsopen", err)
	}
	addresses, err := resolve(ctx, n.Server, o.proto())
	if err != nil {
		return fail("resolve", err)
	}
	pingErrors := make([]error, 0, len(addresses))
	for _, address := range addresses {
		if err := o.ping(ctx, address); err != nil {
			pingErrors = append(pingErrors, err)
			continue
		}
		return n.mountFrom(ctx, address, o)
	}
	return fail("call", fmt.Errorf("%w (%w)", ErrServerSilent, errors.Join(pingErrors...)))
}

// resolve returns the addresses of a server. If proto is not empty, it returns only those in the address
// family of proto, because the kernel rejects others.
func resolve(ctx context.Context, server, proto string) ([]netip.Addr, error) {
	addresses, err := addressesOf(ctx, server)
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", ErrServerName, err)
	}
	if proto != "" {
		six := strings.HasSuffix(proto, "6")
		addresses = slices.DeleteFunc(addresses, func(a netip.Addr) bool { return a.Is6() != six })
	}
	if len(addresses) == 0 {
		return nil, fmt.Errorf("%w: %s has no address that fits proto=%s", ErrServerName, server, proto)
	}
	return addresses, nil
}

// addressesOf returns the addresses of a server, which may be given by its name or by an address.
func addressesOf(ctx context.Context, server string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(server); err == nil {
		return []netip.Addr{a.Unmap()}, nil
	}
	addresses, err := net.DefaultResolver.LookupNetIP(ctx, "ip", server)
	for i := range addresses {
		addresses[i] = addresses[i].Unmap()
	}
	return addresses, err
}

// ping checks that the server responds, because the kernel would try for minutes to mount from a server
// that does not respond. Servers are checked only over TCP.
func (o nfsOptions) ping(ctx context.Context, address netip.Addr) error {
	proto := o.proto()
	if proto != "" && proto != "tcp" && proto != "tcp6" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	port := o.value("port")
	switch {
	case port != "" && port != "0":
	case o.versions[0] == "3":
		return sunrpc.Ping(ctx, net.JoinHostPort(address.String(), portmapPort), sunrpc.PortmapProgram, 2)
	default:
		port = nfsPort
	}
	return sunrpc.Ping(ctx, net.JoinHostPort(address.String(), port), sunrpc.NFSProgram, 4)
}

// mountFrom mounts from one address, with the first of o.versions that the server and the kernel support.
func (n NFS) mountFrom(ctx context.Context, address netip.Addr, o nfsOptions) (*Detached, string, error) {
	var err error
	for _, version := range o.versions {
		if version == "3" && o.locksThroughServer() && !statdRuns(ctx) {
			return nil, "", &Error{Op: "mount", Source: n.String(), FSType: "nfs", Err: ErrNoStatd}
		}
		var d *Detached
		if d, err = n.mountInBackground(ctx, address, version, o); err == nil {
			return d, version, nil
		}
		if !errors.Is(err, ErrNFSVersion) {
			break
		}
	}
	return nil, "", err
}

// statdRuns reports whether rpc.statd is registered with the portmapper of this node.
func statdRuns(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	port, err := sunrpc.Port(ctx, "127.0.0.1:111", sunrpc.StatusProgram, 1, sunrpc.UDP)
	return err == nil && port > 0
}

// mountInBackground mounts in a goroutine. If ctx ends first, the goroutine continues and closes the
// mount.
func (n NFS) mountInBackground(ctx context.Context, address netip.Addr, version string, o nfsOptions) (*Detached, error) {
	type result struct {
		d   *Detached
		err error
	}
	done := make(chan result)
	go func() {
		d, err := n.mountVersion(address, version, o)
		select {
		case done <- result{d, err}:
		case <-ctx.Done():
			if err == nil {
				_ = d.Close()
			}
		}
	}()
	select {
	case r := <-done:
		return r.d, r.err
	case <-ctx.Done():
		return nil, &Error{Op: "mount", Source: n.String(), FSType: "nfs", Err: fmt.Errorf("%w (%w)", ErrServerSilent, ctx.Err())}
	}
}

// mountVersion mounts from one address with one version. The kernel changes the type nfs to nfs4 if the
// option vers= requires that.
func (n NFS) mountVersion(address netip.Addr, version string, o nfsOptions) (d *Detached, err error) {
	if o.Data, err = withAddresses(address, version, o); err != nil {
		return nil, &Error{Op: "mount", Source: n.String(), FSType: "nfs", Err: err}
	}
	d, err = detached(n.String(), "nfs", o.Options, o.explain)
	if err == nil {
		disableDirectoryDelegations()
	}
	return d, err
}

// directoryDelegations is the parameter of the module nfsv4 that makes the kernel request delegations of directories. Linux 7.3 has it, and
// 6.12 does not.
const directoryDelegations = "/sys/module/nfsv4/parameters/directory_delegations"

// disableDirectoryDelegations sets the parameter to N, for all NFS mounts of the node. A delegation belongs to the NFS client, and each mount
// of a node has its own cache of a directory. So the server does not recall the delegation when files are created through another mount of
// this node, and this mount never shows them. The parameter exists after the first mount, which loads the module.
func disableDirectoryDelegations() {
	value, err := os.ReadFile(directoryDelegations)
	if err != nil || strings.TrimSpace(string(value)) == "N" {
		return // the kernel requests none
	}
	if err := os.WriteFile(directoryDelegations, []byte("N"), 0); err != nil {
		klog.Background().Error(err, "Two processes of this node that use an export may not see each other's files: set the parameter to N")
	}
}

// checkClient checks that this process may mount NFS, and that the kernel supports it, and TLS if the options
// require it.
func (o nfsOptions) checkClient() error {
	fsfd, err := unix.Fsopen("nfs", unix.FSOPEN_CLOEXEC)
	switch {
	case errors.Is(err, unix.ENODEV):
		return fmt.Errorf("%w (%w)", ErrNoNFS, err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w (%w)", ErrMayNotMount, err)
	case err != nil:
		return err
	}
	if policy := o.value(optionTLS); policy != "" && unix.FsconfigSetString(fsfd, optionTLS, policy) != nil {
		err = ErrNoTLS
	}
	return errors.Join(err, unix.Close(fsfd))
}

// withAddresses adds the options that mount.nfs(8) would add, because the kernel does not resolve names, and
// uses UDP for mountd by default.
func withAddresses(address netip.Addr, version string, o nfsOptions) ([]string, error) {
	words := append(slices.Clone(o.Data), "vers="+version, "addr="+address.String())
	if version == "3" {
		if o.value("mountproto") != "" {
			return words, nil
		}
		if address.Is6() {
			return append(words, "mountproto=tcp6"), nil
		}
		return append(words, "mountproto=tcp"), nil
	}
	local, err := localAddress(address)
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", ErrServerSilent, err)
	}
	return append(words, "clientaddr="+local.String()), nil
}

// localAddress returns the address of this node on the route to a server, for the callbacks of version
// 4.0. Connecting a UDP socket sends no packet.
func localAddress(server netip.Addr) (netip.Addr, error) {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(server, 2049)))
	if err != nil {
		return netip.Addr{}, err
	}
	defer func() { _ = conn.Close() }()
	local, ok := netip.AddrFromSlice(conn.LocalAddr().(*net.UDPAddr).IP)
	if !ok {
		return netip.Addr{}, fmt.Errorf("no local address towards %s", server)
	}
	return local.Unmap(), nil
}

// reasons maps each error to the errnos of a failed NFS mount that mean the same.
var reasons = map[error][]unix.Errno{
	ErrServerSilent:  {unix.ETIMEDOUT, unix.ECONNREFUSED, unix.ECONNRESET, unix.EHOSTUNREACH, unix.EHOSTDOWN, unix.ENETUNREACH, unix.ENETDOWN, unix.EIO, unix.EPIPE},
	ErrExportMissing: {unix.ENOENT, unix.ENOTDIR, unix.ESTALE},
	ErrExportDenied:  {unix.EACCES, unix.EPERM},
	ErrNFSVersion:    {unix.EPROTONOSUPPORT},
	ErrBadOption:     {unix.EINVAL},
}

// explain wraps an errno in the error that describes it for a mount with these options.
func (o nfsOptions) explain(err error) error {
	if reason := o.reason(err); reason != nil {
		return fmt.Errorf("%w (%w)", reason, err)
	}
	return err
}

// reason returns the error that describes an errno of a mount with these options, or nil.
func (o nfsOptions) reason(err error) error {
	if o.uses("krb5") {
		running, sure := GSSDRuns()
		if reason := kerberosReason(err, o.uses("krb5p"), running, sure); reason != nil {
			return reason
		}
	}
	if transport := o.value(optionTLS); transport == "tls" || transport == "mtls" {
		switch {
		case errors.Is(err, unix.ESRCH):
			return ErrNoTLSHD
		case isAny(err, reasons[ErrExportDenied]...):
			return ErrTLSDenied
		}
	}
	for reason, errnos := range reasons {
		if isAny(err, errnos...) {
			return reason
		}
	}
	return nil
}

// isAny reports whether an error is one of some errnos.
func isAny(err error, errnos ...unix.Errno) bool {
	return slices.ContainsFunc(errnos, func(e unix.Errno) bool { return errors.Is(err, e) })
}
