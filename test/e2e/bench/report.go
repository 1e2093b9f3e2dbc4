package main

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// report prints the medians of the rounds and the phases of the last round, as Markdown.
func report(emptyDirs, volumes []round) {
	up := func(r round) time.Duration { return r.up }
	down := func(r round) time.Duration { return r.down }
	fmt.Println("| | up | down |")
	fmt.Println("|---|--:|--:|")
	fmt.Printf("| emptyDir | %s | %s |\n", seconds(median(emptyDirs, up)), seconds(median(emptyDirs, down)))
	fmt.Printf("| volumes | %s | %s |\n", seconds(median(volumes, up)), seconds(median(volumes, down)))
	fmt.Printf("| ratio | %.2f | %.2f |\n\n",
		float64(median(volumes, up))/float64(median(emptyDirs, up)), float64(median(volumes, down))/float64(median(emptyDirs, down)))

	fmt.Println("Mean duration of each phase over the pods of the last round:")
	fmt.Println()
	fmt.Println("| phase | time |")
	fmt.Println("|---|--:|")
	last := volumes[len(volumes)-1]
	for _, p := range last.phases {
		fmt.Printf("| %s | %s |\n", p.name, seconds(p.took))
	}
	if last.driver == nil {
		return
	}
	all := last.driver.total()
	fmt.Printf("\nThe driver used %.0f ms of the %s that a volume takes in all phases, %.2f %%. The durations of all calls add up to %s, %.1f %% of the round.\n\n",
		1000*all.Seconds()/float64(last.pods), seconds(last.perVolume()), 100*all.Seconds()/float64(last.pods)/last.perVolume().Seconds(),
		seconds(all), 100*all.Seconds()/(last.up+last.down).Seconds())
	fmt.Println("| call | times | total |")
	fmt.Println("|---|--:|--:|")
	for _, method := range slices.Sorted(maps.Keys(last.driver)) {
		s := last.driver[method]
		fmt.Printf("| %s | %d | %.0f ms |\n", method, s.calls, 1000*s.seconds)
	}
}

// median returns the median of a duration over all rounds.
func median(rounds []round, of func(round) time.Duration) time.Duration {
	var all []time.Duration
	for _, r := range rounds {
		all = append(all, of(r))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
