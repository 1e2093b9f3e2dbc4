// Command bench measures volumes through all of Kubernetes: how long many pods with
// a claim each take to be ready and to be gone again, beside as many pods with an
// emptyDir in the same minutes, and where the time goes.
//
// It needs a cluster (KUBECONFIG) with Trivet; test/e2e/run creates one and starts the command
// there.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	pods := flag.Int("pods", 60, "pods in a round")
	rounds := flag.Int("rounds", 3, "rounds of each kind, in turns")
	class := flag.String("class", "trivet-loop", "StorageClass of the claims")
	metrics := flag.String("metrics", "", "URLs of the metrics of the nodes' drivers, with commas between")
	flag.Parse()
	if err := bench(*pods, *rounds, *class, *metrics); err != nil {
		log.Fatal(err)
	}
}

func bench(pods, rounds int, class, metrics string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 1000, 2000
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	var floor, volumes []round
	for i := range rounds {
		for _, kind := range []struct {
			class string
			into  *[]round
		}{{"", &floor}, {class, &volumes}} {
			r, err := play(ctx, client, fmt.Sprintf("bench-%d%s", i, map[bool]string{true: "-volumes"}[kind.class != ""]), pods, kind.class, metrics)
			if err != nil {
				return err
			}
			*kind.into = append(*kind.into, r)
			time.Sleep(2 * time.Second) // let the last round's end not be this one's beginning
		}
	}
	report(floor, volumes)
	return nil
}
