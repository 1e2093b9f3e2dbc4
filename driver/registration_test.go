package driver_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
)

// A driver registers itself where it is told to, and takes its socket away at its end.
func TestRegistration(t *testing.T) {
	registry := filepath.Join(t.TempDir(), "registry")
	socket := filepath.Join(registry, backendtest.DriverName+"-reg.sock")
	t.Run("serving", func(t *testing.T) {
		d := backendtest.StartWith(t, registering(t, registry))
		conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		info, err := registration.NewRegistrationClient(conn).GetInfo(t.Context(), &registration.InfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if info.GetType() != registration.CSIPlugin || info.GetName() != d.Options.Name || "unix://"+info.GetEndpoint() != d.Options.Endpoint {
			t.Errorf("it registers as %v", info)
		}
	})
	if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after its end: %v", err)
	}
}

func registering(t *testing.T, registry string) driver.Options {
	t.Helper()
	o := backendtest.NewCluster(t).NodeOptions(t, "a", filepath.Join(t.TempDir(), "pool"), loop.Kind)
	o.Config.Forwarding, o.Services, o.Registry = nil, []string{"controller", "node"}, registry
	return o
}
