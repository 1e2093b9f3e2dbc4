// Command livenessprobe answers HTTP health checks by calling Probe of a CSI driver. It
// replaces the sidecar with the same name and flags, which is not available as a Go
// module, in the clusters of tests.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os/signal"
	"syscall"
	"time"

	"github.com/kubernetes-csi/csi-lib-utils/connection"
	"github.com/kubernetes-csi/csi-lib-utils/rpc"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"
)

const defaultPort = "9808"

func main() {
	klog.InitFlags(nil)
	csiAddress := flag.String("csi-address", "/run/csi/socket", "`path` of the driver's socket")
	timeout := flag.Duration("probe-timeout", 3*time.Second, "timeout of a Probe call")
	port := flag.String("health-port", defaultPort, "`port` that serves /healthz")
	address := flag.String("http-endpoint", "", "`address` that serves /healthz, instead of --health-port")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := func() error {
		if *address == "" {
			*address = ":" + *port
		} else if *port != defaultPort {
			return errors.New("--health-port and --http-endpoint cannot both be set")
		}
		return serve(ctx, *csiAddress, *address, *timeout)
	}()
	if err != nil {
		klog.ErrorS(err, "Serving /healthz failed")
		klog.FlushAndExit(klog.ExitFlushTimeout, 1)
	}
}

// serve serves /healthz on an address until ctx ends.
func serve(ctx context.Context, csiAddress, address string, timeout time.Duration) error {
	// ConnectWithoutMetrics waits for the driver. Until the driver listens, nothing listens on the
	// address, so the kubelet's probes fail.
	conn, err := connection.ConnectWithoutMetrics(ctx, csiAddress, connection.WithTimeout(0))
	if err != nil {
		return err
	}
	defer conn.Close()
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, r *http.Request) {
		if err := probe(r.Context(), conn, timeout); err != nil {
			klog.ErrorS(err, "Unhealthy", "address", csiAddress)
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprint(w, "ok")
	})
	server := &http.Server{Addr: address, Handler: mux, ReadHeaderTimeout: timeout}
	go func() {
		<-ctx.Done()
		_ = server.Close()
	}()
	klog.InfoS("Serving", "address", address)
	if err = server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// probe fails unless the driver reports that it is ready.
func probe(ctx context.Context, conn *grpc.ClientConn, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	ready, err := rpc.Probe(ctx, conn)
	if err == nil && !ready {
		err = errors.New("Probe returned that the driver is not ready")
	}
	return err
}
