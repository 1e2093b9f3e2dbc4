package mount

import (
	"context"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/internal/sunrpc"
)

// Endpoint is where an NFS server is reached, and how.
type Endpoint struct {
	// Address is an IP address; empty where none is known yet.
	Address string
	// Port is empty for the protocol's usual one, and where the portmapper tells it.
	Port string
	// Proto is rdma or udp; empty: TCP.
	Proto string
	// Portmapped: the portmapper tells the port, which only version 3 has.
	Portmapped bool
}

const (
	nfsPort     = "2049"
	rdmaPort    = "20049" // nfsrdma, as IANA has it
	portmapPort = "111"
)

// ParseEndpoint takes from mount options what says where the server is; each may be
// several words with commas between them, as the mount table has them.
func ParseEndpoint(options []string) Endpoint {
	var e Endpoint
	var three bool
	for _, word := range splitWords(options) {
		switch key, value, _ := strings.Cut(word, "="); key {
		case "addr":
			e.Address = value
		case "port":
			e.Port = value
		case "proto", "tcp", "udp", "rdma":
			e.Proto = strings.TrimSuffix(protoOf(word), "6")
		case "vers", "nfsvers":
			three = value == "3"
		case "v3":
			three = true
		}
	}
	if e.Proto == "tcp" {
		e.Proto = ""
	}
	e.Port = unusual(e.Port, e.Proto)
	e.Portmapped = three && e.Port == ""
	return e
}

// protoOf is the protocol that a word asks for: `proto=rdma` is also written `rdma`
// (nfs(5)); empty if it asks for none.
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

// unusual is a port other than the one that is taken anyway; empty for that one, and
// for what is no port.
func unusual(port, proto string) string {
	n, err := strconv.ParseUint(port, 10, 16)
	usual := proto != "rdma" && port == nfsPort || proto == "rdma" && port == rdmaPort
	if err != nil || n == 0 || usual {
		return ""
	}
	return port
}

// Ping makes the NULL call of NFS over a connection of its own, and asks no mount: nil
// means that the server answers, or that it cannot be asked, which only TCP can.
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

// NFSEndpoint is where the server of an NFS mount is, for this mount.
func NFSEndpoint(e *Entry) Endpoint { return ParseEndpoint([]string{e.VFSOptions}) }

// soon is how long a server that is doubted has to answer: a TCP handshake with a lost
// packet takes 1 s.
const soon = 2 * time.Second

// Answers tells whether the server of an NFS mount answers for this mount, within 2 s,
// or cannot be asked.
func Answers(ctx context.Context, e *Entry) bool {
	ctx, cancel := context.WithTimeout(ctx, soon)
	defer cancel()
	return NFSEndpoint(e).Ping(ctx) == nil
}
