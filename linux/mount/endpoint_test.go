package mount_test

import (
	"testing"

	"github.com/trivet-csi/trivet/linux/mount"
)

// TestParseEndpoint compares the endpoints of mount options with the expected ones.
func TestParseEndpoint(t *testing.T) {
	for options, want := range map[string]mount.Endpoint{
		"":                                {},
		"nfsvers=4.2,hard":                {},
		"nfsvers=3":                       {Portmapped: true},
		"vers=3,port=0":                   {Portmapped: true},
		"v3,port=2050":                    {Port: "2050"},
		"port=1,hard,port=2":              {Port: "2"},
		"port=2049,proto=tcp6":            {},
		"port=99999":                      {},
		"tcp":                             {},
		"udp,vers=3":                      {Proto: "udp", Portmapped: true},
		"proto=rdma":                      {Proto: "rdma"},
		"rdma,port=20049":                 {Proto: "rdma"},
		"port=20049,proto=rdma6":          {Proto: "rdma"},
		"port=20049":                      {Port: "20049"},
		"rw,vers=4.2,addr=fe80::1%2,soft": {Address: "fe80::1%2"},
	} {
		if got := mount.ParseEndpoint([]string{options}); got != want {
			t.Errorf("%q: got %+v, want %+v", options, got, want)
		}
	}
}
