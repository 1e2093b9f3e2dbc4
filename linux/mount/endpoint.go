package mount

import (
	"context"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/internal/mountflags"
	"github.com/trivet-csi/trivet/internal/sunrpc"
)

// Endpoint is the address of an NFS server, and the protocol to reach it.
type Endpoint struct {
	// Address is an IP address. It is empty if the address is unknown.
	Address string
	// Port is empty for the default port of the protocol, and if the portmapper returns the port.
	Port string
	// Proto is rdma or udp, or empty for TCP.
	Proto string
	// Portmapped means that the portmapper returns the port. Only NFS version 3 uses the portmapper.
	Portmapped bool
}

const (
	nfsPort     = "2049"
	rdmaPort    = "20049" // nfsrdma, assigned by IANA
	portmapPort = "111"
)

// ParseEndpoint reads an endpoint from mount options. Each option may contain several words, separated by
// commas, as in the mount table.
func ParseEndpoint(options []string) Endpoint {
	var e Endpoint
	var version3 bool
	for _, word := range mountflags.Split(options) {
		switch key, value, _ := strings.Cut(word, "="); key {
		case "addr":
			e.Address = value
		case "port":
			e.Port = value
		case "proto", "tcp", "udp", "rdma":
			e.Proto = strings.TrimSuffix(protoOf(word), "6")
		case "vers", "nfsvers":
			version3 = value == "3"
		case "v3":
			version3 = true
		}
	}
	if e.Proto == "tcp" {
		e.Proto = ""
	}
	e.Port = nonDefault(e.Port, e.Proto)
	e.Portmapped = version3 && e.Port == ""
	return e
}

// protoOf returns the protocol that a word sets, or "". nfs(5) accepts `proto=rdma` and `rdma`.
func protoOf(word string) string {
	key, value, _ := strings.Cut(word, "=")
	switch key {
	case "proto":
		return value
	case "tcp", "udp", "rdma":
		return key
	}
	return ""
}

// nonDefault returns a port, or "" if it is invalid or the default port of the protocol.
func nonDefault(port, proto string) string {
	n, err := strconv.ParseUint(port, 10, 16)
	isDefault := proto != "rdma" && port == nfsPort || proto == "rdma" && port == rdmaPort
	if err != nil || n == 0 || isDefault {
		return ""
	}
	return port
}

// Ping makes the NULL call of NFS over a new connection, not through a mount. It returns nil if the server
// responds, and also for other protocols than TCP, which it cannot check.
func (e Endpoint) Ping(ctx context.Context) error {
	if e.Proto != "" {
		return nil
	}
	port, version := e.Port, uint32(4)
	if e.Portmapped {
		version = 3
		found, err := sunrpc.Port(ctx, net.JoinHostPort(e.Address, portmapPort), sunrpc.NFSProgram, version, sunrpc.TCP)
		if err == nil && found > 0 {
			port = strconv.Itoa(found)
		}
	}
	if port == "" {
		port = nfsPort
	}
	return sunrpc.Ping(ctx, net.JoinHostPort(e.Address, port), sunrpc.NFSProgram, version)
}

// NFSEndpoint returns the endpoint of an NFS mount.
func NFSEndpoint(e *Entry) Endpoint { return ParseEndpoint([]string{e.VFSOptions}) }

// pingTimeout is longer than a TCP handshake with one lost packet, which takes 1 s.
const pingTimeout = 2 * time.Second

// Answers reports whether the server of an NFS mount responds at the address of the mount within 2 s. It is
// true if the server cannot be checked (Ping).
func Answers(ctx context.Context, e *Entry) bool {
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	return NFSEndpoint(e).Ping(ctx) == nil
}
