//go:build vm

package loop_test

import (
	"fmt"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

func TestNFSConformance(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	exports := 0
	backendtest.Run(t, backendtest.Target{
		New:   loop.New,
		Kinds: []backendtest.Kind{{FSType: "ext4", Pool: backendtest.SharedPool}, {FSType: "xfs", Pool: backendtest.SharedPool}, {Pool: backendtest.SharedPool}},
		Export: func(tb testing.TB) backendtest.Export {
			exports++
			path := s.Export(tb, fmt.Sprintf("export-%d", exports))
			return backendtest.Export{Server: s.Address(), Path: path, Dir: s.Dir(path)}
		},
		Options: func(o *driver.Options) { o.Worker = backendtest.Worker() },
	})
}
