// After the source: how its kernels are launched.
static void (*body)();
static void** places;  // of its arguments
static int alive;
static void thread() {
    threadIdx = {now, 0, 0};
    body();
    progress++;
    fibres[now].met = fibres[now].met_warp = 1L << 60;
    alive--;
    for (;;) swapcontext(&fibres[now].context, &home);
}
template <class... Arguments> static void call(void (*kernel)(Arguments...)) {
    [&]<size_t... I>(std::index_sequence<I...>) {
        kernel(*(Arguments*)places[I]...);
    }(std::index_sequence_for<Arguments...>());
}
struct ThreadBlock {
    Index index;
    int alive;
    std::vector<Fibre> fibres;
    std::vector<char> memory;  // while others run
};
static void exchange_memory(ThreadBlock& block) {
    std::swap(fibres, block.fibres);
    std::swap_ranges(block.memory.begin(), block.memory.end(), shared_memory);
}
// As far as the block can go: a warp goes as far as it can, the first or the last of them first. True at its end.
static bool proceed(ThreadBlock& block, int number) {
    exchange_memory(block);
    blockIdx = block.index, alive = block.alive;
    for (long start = -1; alive && start != progress;) {
        start = progress;
        for (int k = 0, warps = (int)fibres.size() / 32; k < warps; k++) {
            const int first = (number % 2 ? warps - 1 - k : k) * 32;
            for (long before = -1; before != progress;) {
                before = progress;
                for (now = first; now < first + 32; now++) swapcontext(&home, &fibres[now].context);
            }
        }
    }
    block.alive = alive;
    exchange_memory(block);
    return block.alive == 0;
}
static ThreadBlock begun(Index index, int threads) {
    ThreadBlock block{index, threads, std::vector<Fibre>(threads), std::vector<char>(sizeof shared_memory, -1)};
    for (Fibre& fibre : block.fibres) {
        fibre.stack.resize(1 << 16), fibre.met = fibre.met_warp = fibre.group = 0;
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.data(), fibre.context.uc_stack.ss_size = fibre.stack.size();
        makecontext(&fibre.context, thread, 0);
    }
    return block;
}
// False if a thread block wrote behind its shared memory, left copies on their way, or waits for ever.
static bool launch(void (*kernel)(), Index grid, int threads, int shared, void** arguments) {
    body = kernel, places = arguments, gridDim = grid;
    bool fine = shared <= (int)sizeof shared_memory;
    const auto ended = [&](ThreadBlock& block, int number) {
        if (!proceed(block, number)) return false;
        for (const Fibre& fibre : block.fibres) fine &= fibre.copies.empty();
        for (int at = shared; at < (int)block.memory.size(); at++) fine &= block.memory[at] == -1;
        return true;
    };
    std::list<ThreadBlock> waiting;
    for (int i = 0; i < grid.x * grid.y * grid.z; i++) {
        waiting.push_back(begun({i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y}, threads));
        if (ended(waiting.back(), i)) waiting.pop_back();
    }
    for (long before = -1; !waiting.empty() && before != progress;) {
        before = progress;
        waiting.remove_if([&](ThreadBlock& block) { return ended(block, 0); });
    }
    return fine && waiting.empty();
}
#define KERNEL(name) \
    extern "C" bool launch_##name(int x, int y, int z, int threads, int shared, void** arguments) { \
        return launch([] { call(name); }, {x, y, z}, threads, shared, arguments); \
    }
