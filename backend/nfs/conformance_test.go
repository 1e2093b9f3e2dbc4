//go:build vm

package nfs_test

import (
	"fmt"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

func TestConformance(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{MountOptions: []string{"noatime"}}) // the server changes what is only read
	exports := 0
	backendtest.Run(t, backendtest.Target{
		New:   nfs.New,
		Kinds: []backendtest.Kind{{FSType: "nfs", Pool: backendtest.SharedPool}},
		Export: func(tb testing.TB) backendtest.Export {
			exports++
			path := s.Export(tb, fmt.Sprintf("export-%d", exports))
			return backendtest.Export{Server: s.Address(), Path: path, Dir: s.Dir(path)}
		},
		Options: func(o *driver.Options) { o.Worker = backendtest.Worker() },
	})
}
