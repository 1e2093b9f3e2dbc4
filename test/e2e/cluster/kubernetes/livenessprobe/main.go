// Command livenessprobe answers HTTP health checks with a CSI driver's Probe. It
// takes the flags of the sidecar of that name, which cannot be had as a Go
// module, and stands in for it in the tests' cluster.
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
	csiAddress := flag.String("csi-address", "/run/csi/socket", "socket of the driver")
	timeout := flag.Duration("probe-timeout", 3*time.Second, "time for one probe")
	port := flag.String("health-port", defaultPort, "port to serve /healthz on")
	address := flag.String("http-endpoint", "", "address to serve /healthz on, instead of --health-port")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := func() error {
		if *address == "" {
			*address = ":" + *port
		} else if *port != defaultPort {
			return errors.New("--health-port and --http-endpoint exclude each other")
		}
		return serve(ctx, *csiAddress, *address, *timeout)
	}()
	if err != nil {
		klog.ErrorS(err, "Not serving")
		klog.FlushAndExit(klog.ExitFlushTimeout, 1)
	}
}

func serve(ctx context.Context, csiAddress, address string, timeout time.Duration) error {
	// Until the driver is there nothing listens, which fails a probe as well.
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

func probe(ctx context.Context, conn *grpc.ClientConn, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	ready, err := rpc.Probe(ctx, conn)
	if err == nil && !ready {
		err = errors.New("the driver says that it is not ready")
	}
	return err
}
