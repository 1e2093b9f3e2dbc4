package worker

import (
	"context"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/trivet-csi/trivet/internal/sunrpc"
	"github.com/trivet-csi/trivet/pool"
)

// server is asked whether it answers.
type server struct {
	name string
	port string // empty: as the portmapper says, which only version 3 has
	tcp  bool   // it can be asked at all

	mu    sync.Mutex
	known []string // addresses of the last look-up
}

const (
	nfsPort     = "2049"
	portmapPort = "111"
	// lookUpTime bounds a look-up; if it fails the addresses of the last one are asked:
	// mounts do not need the name service.
	lookUpTime = 2 * time.Second
)

func newServer(n *pool.NFS) *server {
	s := &server{name: strings.Trim(n.Server, "[]"), port: nfsPort, tcp: true}
	words := optionWords(n.MountOptions)
	if slices.ContainsFunc(words, func(w string) bool { return w == "vers=3" || w == "nfsvers=3" || w == "v3" }) {
		s.port = ""
	}
	if port := portOf(words); port != "" {
		s.port = port
	}
	for _, word := range words {
		if proto, ok := strings.CutPrefix(word, "proto="); ok {
			s.tcp = strings.HasPrefix(proto, "tcp")
		}
	}
	return s
}

func optionWords(options []string) []string { return strings.Split(strings.Join(options, ","), ",") }

// portOf is the port that mount options name; empty if none.
func portOf(words []string) string {
	for _, word := range slices.Backward(words) {
		port, ok := strings.CutPrefix(word, "port=")
		if n, err := strconv.ParseUint(port, 10, 16); ok && err == nil && n > 0 {
			return port
		}
	}
	return ""
}

// ping returns nil when an address of the server answers, or when nobody can tell.
func (s *server) ping(ctx context.Context) error {
	if !s.tcp {
		return nil
	}
	hosts, err := s.addresses(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan error, len(hosts))
	for _, host := range hosts {
		go func() { answers <- s.pingHost(ctx, host) }()
	}
	for range hosts {
		if err = <-answers; err == nil {
			return nil
		}
	}
	return err
}

func (s *server) pingHost(ctx context.Context, host string) error {
	port, version := s.port, uint32(4)
	if port == "" {
		port, version = nfsPort, 3
		found, err := sunrpc.Port(ctx, net.JoinHostPort(host, portmapPort), sunrpc.NFSProgram, version, sunrpc.TCP)
		if err == nil && found > 0 {
			port = strconv.Itoa(found)
		}
	}
	return sunrpc.Ping(ctx, net.JoinHostPort(host, port), sunrpc.NFSProgram, version)
}

func (s *server) addresses(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, lookUpTime)
	defer cancel()
	hosts, err := net.DefaultResolver.LookupHost(ctx, s.name)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && len(s.known) == 0 {
		return nil, err
	}
	if err == nil {
		s.known = hosts
	}
	return s.known, nil
}
